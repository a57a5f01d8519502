"""The shared-memory file of one node: the agent's control word and a block of 1 KiB for each rank.

    0      header 256 B   magic, version, sizes, agent_lost_ms, what is asked   written by the agent only
    256    rank block 0   beat 128 B | stats 896 B                              written by local rank 0 only
    1280   rank block 1   …

All numbers are little-endian. A beat or a stats record is written under a sequence lock: its first u64 is odd while the
writer is inside, even when stable; the last u32 is the CRC-32 of everything between. A reader that finds an odd number,
a number that moved while it read, or a wrong CRC has read nothing: it gets `Unreadable`, which is not "dead".

Every cycle gets a new file under the same name (unlink, create): a zombie rank of an earlier cycle goes on writing into
memory that nobody reads. While it lives the agent holds an exclusive lock on the file: a rank that can get a shared one
has no agent any more, and ends itself when that lasts for `agent_lost_ms`.
"""

import contextlib
import fcntl
import mmap
import os
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Self

from orchestrator.state.epochs import Epoch
from orchestrator.state.records import Unreadable

MAGIC = b"PAWLSHM1"
VERSION = 1
HEADER_BYTES = 256
RANK_STRIDE = 1024
BEAT_BYTES = 128
STATS_BYTES = RANK_STRIDE - BEAT_BYTES
CONTROL_OFFSET = 64
PROFILE_OFFSET = 80
MAX_PROFILED = 64  # local ranks: one bit each

STEP_BUCKET_BOUNDS_S = (
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0),
    *(7.5, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 300.0, float("inf")),
)

_HEADER = struct.Struct("<8sIIIII")
_CONTROL = struct.Struct("<QI")
_PROFILE = struct.Struct("<QI4xQ")
_BEAT = struct.Struct("<QIIIIIIQQQQQdQQ")
_STATS = struct.Struct("<QQQQdddQQQdQdQdddddd" + "QQdd" + "24Q" + "Qdd")
_SEQ = struct.Struct("<Q")
_CRC = struct.Struct("<I")


class ControlWord(IntEnum):
    """What the agent asks of its ranks; they read it at the step border and agree by MAX."""

    NONE = 0
    SAVE = 1
    DRAIN = 2


class Phase(IntEnum):
    """What a rank says it is doing. The limits of `PhaseLimits` go by the lower-case names."""

    INIT = 0
    COMPILE = 1
    RESTORE = 2
    STEP = 3
    EVAL = 4
    SAVE = 5
    DATA = 6
    EXIT = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """One 128-byte sign of life. `*_ns`: this host's CLOCK_MONOTONIC; `step` counts completed updates."""

    seq: int
    attempt: int
    generation: int
    cycle: int
    rank: int
    pid: int
    phase: Phase
    step: int
    beat_monotonic_ns: int
    phase_since_ns: int
    collective_seq: int
    control_ack: int
    loss: float
    tokens: int
    profile_ack: int

    @property
    def epoch(self) -> Epoch:
        """The epoch that wrote this beat; beats of any other epoch than the running one are ignored."""
        return Epoch(self.attempt, self.generation, self.cycle)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Counters of one rank process since its start. NaN means unknown; `step_buckets` are not cumulative."""

    seq: int
    steps_total: int
    tokens_total: int
    samples_total: int
    model_flops_total: float
    step_seconds_sum: float
    data_wait_seconds_total: float
    nonfinite_steps_total: int
    skipped_steps_total: int
    checkpoint_saves_total: int
    checkpoint_blocking_seconds_sum: float
    checkpoint_last_step: int
    checkpoint_last_unix: float
    checkpoint_bytes: int
    checkpoint_load_seconds: float
    loss: float
    grad_norm: float
    learning_rate: float
    tokens_per_second: float
    mfu: float
    memory_allocated_bytes: int
    memory_peak_bytes: int
    last_step_seconds: float
    last_unix: float
    step_buckets: tuple[int, ...]
    validation_passes_total: int
    validation_seconds_total: float
    validation_loss: float


_STATS_NAMES = tuple(Stats.__dataclass_fields__)


def path_of(*, uid: int, nonce: str, node: str) -> Path:
    """Where the agent of `node` keeps its file."""
    return Path("/dev/shm") / f"pawl-{uid}-{nonce}-{node}"


def remove_left(*, uid: int, nonces: Iterable[str]) -> int:
    """Remove the files of attempts that are over: whoever kills an agent and its supervisor at once leaves them.

    Returns how many; what cannot be removed stays.
    """
    plain = (nonce for nonce in nonces if nonce.isalnum())
    left = [path for nonce in plain for path in Path("/dev/shm").glob(f"pawl-{uid}-{nonce}-*")]
    for path in left:
        with contextlib.suppress(OSError):
            path.unlink()
    return len(left)


def parse_beat(raw: bytes) -> Beat | Unreadable:
    """A beat from its 128 bytes. Unreadable: odd sequence, wrong CRC, never written, or a phase of another version."""
    why = _defect(raw, BEAT_BYTES)
    if why is not None:
        return Unreadable(why=why)
    fields = _BEAT.unpack_from(raw)
    if fields[6] not in Phase._value2member_map_:
        return Unreadable(why=f"phase {fields[6]} is not known to this version")
    names = tuple(Beat.__dataclass_fields__)
    values = dict(zip(names, fields, strict=True))
    values["phase"] = Phase(fields[6])
    return Beat(**values)


def parse_stats(raw: bytes) -> Stats | Unreadable:
    """Step statistics from their 896 bytes. Unreadable: odd sequence, wrong CRC or never written."""
    why = _defect(raw, STATS_BYTES)
    if why is not None:
        return Unreadable(why=why)
    fields = _STATS.unpack_from(raw)
    at, num_buckets = _STATS_NAMES.index("step_buckets"), len(STEP_BUCKET_BOUNDS_S)
    values = (*fields[:at], fields[at : at + num_buckets], *fields[at + num_buckets :])
    return Stats(**dict(zip(_STATS_NAMES, values, strict=True)))


def _defect(raw: bytes, size: int) -> str | None:
    if len(raw) != size:
        return f"{len(raw)} bytes instead of {size}"
    (seq,) = _SEQ.unpack_from(raw)
    if seq == 0:
        return "never written"
    if seq % 2:
        return "being written"
    (stored,) = _CRC.unpack_from(raw, size - 4)
    if stored != zlib.crc32(raw[8 : size - 4]):
        return "wrong checksum"
    return None


class NodeMemory:
    """The agent's side of a node's file: it owns the header, and reads the rank blocks.

    Close it when the cycle is over; `unlink` when nothing of the attempt runs here any more.
    """

    def __init__(self, path: Path, fd: int, memory: mmap.mmap, num_ranks: int) -> None:
        self.path = path
        self._lock_fd = fd
        self.num_ranks = num_ranks
        self._memory = memory
        self._control_seq = 0

    @classmethod
    def create(cls, path: Path, *, num_ranks: int, agent_lost_s: float = 0.0) -> Self:
        """A new zeroed file (mode 0600) with its header, locked by this process until `close`.

        `agent_lost_s`: how long ranks go on after this process died; 0: for ever. Raises OSError when /dev/shm is full
        or not writable.
        """
        path.unlink(missing_ok=True)
        size = HEADER_BYTES + RANK_STRIDE * num_ranks
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            # posix_fallocate: a full /dev/shm must fail here as ENOSPC, not later as SIGBUS in a rank.
            os.posix_fallocate(fd, 0, size)
            memory = mmap.mmap(fd, size)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        lost_ms = min(round(agent_lost_s * 1000), 2**32 - 1)
        _HEADER.pack_into(memory, 0, MAGIC, VERSION, num_ranks, RANK_STRIDE, HEADER_BYTES, lost_ms)
        return cls(path, fd, memory, num_ranks)

    def write_control(self, word: ControlWord) -> int:
        """Ask the ranks for something; returns the control_seq that they acknowledge in `Beat.control_ack`.

        The word is written before the number that announces it.
        """
        self._control_seq += 1
        struct.pack_into("<I", self._memory, CONTROL_OFFSET + 8, int(word))
        struct.pack_into("<Q", self._memory, CONTROL_OFFSET, self._control_seq)
        return self._control_seq

    def write_profile(self, number: int, *, steps: int, local_ranks: Iterable[int]) -> None:
        """Ask the ranks to record steps on some of them; they acknowledge `number` in `Beat.profile_ack`.

        What is asked is written before the number that announces it.
        """
        bits = sum(1 << local for local in set(local_ranks) if local < MAX_PROFILED)
        struct.pack_into("<I4xQ", self._memory, PROFILE_OFFSET + 8, steps, bits)
        struct.pack_into("<Q", self._memory, PROFILE_OFFSET, number)

    @property
    def profile(self) -> tuple[int, int, int]:
        """(number, steps, bits of the local ranks that record) as the ranks see them."""
        number, steps, bits = _PROFILE.unpack_from(self._memory, PROFILE_OFFSET)
        return number, steps, bits

    @property
    def control(self) -> tuple[int, ControlWord]:
        """(control_seq, word) as the ranks see them."""
        seq, word = _CONTROL.unpack_from(self._memory, CONTROL_OFFSET)
        return seq, ControlWord(word)

    def read_beat(self, local_rank: int) -> Beat | Unreadable:
        """The newest stable beat of a local rank."""
        return parse_beat(self._stable(HEADER_BYTES + RANK_STRIDE * local_rank, BEAT_BYTES))

    def read_stats(self, local_rank: int) -> Stats | Unreadable:
        """The newest stable statistics of a local rank."""
        return parse_stats(self._stable(HEADER_BYTES + RANK_STRIDE * local_rank + BEAT_BYTES, STATS_BYTES))

    def _stable(self, offset: int, size: int) -> bytes:
        raw = b""
        for _ in range(20):
            raw = self._memory[offset : offset + size]
            (before,) = _SEQ.unpack_from(raw)
            (after,) = _SEQ.unpack_from(self._memory, offset)
            if before == after and before % 2 == 0:
                break
        return raw

    def close(self) -> None:
        """Give the mapping and the lock back; the file stays."""
        self._memory.close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def unlink(self) -> None:
        """Remove the file; ranks that still map it keep their memory."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
