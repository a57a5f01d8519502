"""Beats: 128 bytes in shared memory that say where a rank is, and 896 that say what it has done.

The training thread writes them itself, at every change of phase and every step border: tens of microseconds, no
system call, no lock, no other thread. So a rank that hangs, wherever it hangs, shows exactly that: its last phase,
growing old. The agent, another process, reads them (layout: configs/schema/shm.md and shm.json) and answers with one
control word.

Each record is a seqlock: seq odd, body and CRC, seq even. Without `--shm` the same writer writes to private memory,
where nobody reads: one path for a laptop and for ten thousand ranks.
"""

import math
import mmap
import os
import struct
import time
import zlib
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import astuple, dataclass, field, replace
from enum import IntEnum
from pathlib import Path

from trainer.errors import ConfigError
from trainer.records import Epoch

MAGIC = b"PAWLSHM1"
VERSION = 1
HEADER_BYTES = 256
RANK_STRIDE = 1024
STATS_AT = 128

HEADER = struct.Struct("<8s4I")  # magic, version, num_ranks, rank_stride, header_bytes
AGENT_LOST_AT = 24
AGENT_LOST = struct.Struct("<I")  # milliseconds; 0: ranks do not look for their agent
CONTROL_AT = 64
CONTROL = struct.Struct("<QI")  # control_seq, control_word
PROFILE_AT = 80
PROFILE = struct.Struct("<QI4xQ")  # profile_seq, profile_steps, profile_ranks (bit i: local rank i records)

# Bodies lie between seq (8 bytes) and crc32 (the last 4).
BEAT_BODY = struct.Struct("<6I5QdQQ28x")
STATS_BODY = struct.Struct("<3Q3d3QdQdQ6d2Q2d24QQ2d484x")
SEQ_BYTES = 8

HISTOGRAM_BOUNDS_S = (
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0),
    *(7.5, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 300.0, math.inf),
)


class Phase(IntEnum):
    """What a rank is doing; each has its own time limit in the agent."""

    INIT = 0
    COMPILE = 1
    RESTORE = 2
    STEP = 3
    EVAL = 4
    SAVE = 5
    DATA = 6
    EXIT = 7


class Word(IntEnum):
    """What the agent asks of the ranks; the largest word of all ranks is what they all do."""

    NONE = 0
    SAVE = 1
    DRAIN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """Where a rank is. Field order is byte order."""

    attempt: int
    generation: int
    cycle: int
    rank: int
    pid: int
    phase: int = Phase.INIT
    step: int = 0
    beat_monotonic_ns: int = 0
    phase_since_ns: int = 0
    collective_seq: int = 0
    control_ack: int = 0
    loss: float = math.nan
    tokens: int = 0
    profile_ack: int = 0


@dataclass(slots=True, kw_only=True)
class Stats:
    """What this process has done since it started; NaN = unknown. Field order is byte order."""

    steps_total: int = 0
    tokens_total: int = 0
    samples_total: int = 0
    model_flops_total: float = 0.0
    step_seconds_sum: float = 0.0
    data_wait_seconds_total: float = 0.0
    nonfinite_steps_total: int = 0
    skipped_steps_total: int = 0
    checkpoint_saves_total: int = 0
    checkpoint_blocking_seconds_sum: float = 0.0
    checkpoint_last_step: int = 0
    checkpoint_last_unix: float = math.nan
    checkpoint_bytes: int = 0
    checkpoint_load_seconds: float = math.nan
    loss: float = math.nan
    grad_norm: float = math.nan
    learning_rate: float = math.nan
    tokens_per_second: float = math.nan
    mfu: float = math.nan
    memory_allocated_bytes: int = 0
    memory_peak_bytes: int = 0
    last_step_seconds: float = math.nan
    last_unix: float = math.nan
    step_seconds_histogram: list[int] = field(default_factory=lambda: [0] * len(HISTOGRAM_BOUNDS_S))
    validation_passes_total: int = 0
    validation_seconds_total: float = 0.0
    validation_loss: float = math.nan

    def observe_step_seconds(self, seconds: float) -> None:
        """Count one step of this duration: sum, last, and the first bucket whose upper bound holds it."""
        self.step_seconds_sum += seconds
        self.last_step_seconds = seconds
        self.step_seconds_histogram[bisect_left(HISTOGRAM_BOUNDS_S, seconds)] += 1


def encode_beat(beat: Beat) -> bytes:
    """The 120 bytes after seq: body and CRC-32."""
    return _with_crc(BEAT_BODY.pack(*astuple(beat)))


def encode_stats(stats: Stats) -> bytes:
    """The 888 bytes after seq: body and CRC-32."""
    flat = (each for value in astuple(stats) for each in (value if isinstance(value, list) else [value]))
    return _with_crc(STATS_BODY.pack(*flat))


def _with_crc(body: bytes) -> bytes:
    return body + struct.pack("<I", zlib.crc32(body))


class BeatWriter:
    """The one writer of a rank's block. Not thread-safe: only the training thread beats."""

    def __init__(
        self, memory: mmap.mmap, *, local_rank: int, beat: Beat, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._memory = memory
        self._words = memoryview(memory).cast("Q")
        self._local_rank = local_rank
        self._at = HEADER_BYTES + RANK_STRIDE * local_rank
        self._clock_ns = clock_ns
        self._beat = replace(beat, phase_since_ns=clock_ns())
        self.stats = Stats()
        self.beat()

    @property
    def phase(self) -> Phase:
        """The phase last published."""
        return Phase(self._beat.phase)

    @property
    def step(self) -> int:
        """Completed optimizer steps, as last published."""
        return self._beat.step

    def beat(
        self,
        phase: Phase | None = None,
        *,
        step: int | None = None,
        collective_seq: int | None = None,
        loss: float | None = None,
        tokens: int | None = None,
        control_ack: int | None = None,
        profile_ack: int | None = None,
    ) -> None:
        """Publish where this rank is; what is not given stays as it was. `phase_since_ns` moves only with the phase."""
        now = self._clock_ns()
        old = self._beat
        self._beat = replace(
            old,
            phase=old.phase if phase is None else phase,
            phase_since_ns=old.phase_since_ns if phase in (None, old.phase) else now,
            step=old.step if step is None else step,
            beat_monotonic_ns=now,
            collective_seq=old.collective_seq if collective_seq is None else collective_seq,
            loss=old.loss if loss is None else loss,
            tokens=old.tokens if tokens is None else tokens,
            control_ack=old.control_ack if control_ack is None else control_ack,
            profile_ack=old.profile_ack if profile_ack is None else profile_ack,
        )
        self._publish(self._at, encode_beat(self._beat))

    def publish_stats(self) -> None:
        """Publish `self.stats` as they stand now."""
        self._publish(self._at + STATS_AT, encode_stats(self.stats))

    def control(self) -> tuple[int, Word]:
        """(control_seq, word) of the agent. A word this trainer does not know is read as none."""
        seq, word = CONTROL.unpack_from(self._memory, CONTROL_AT)
        return seq, Word(word) if word <= Word.DRAIN else Word.NONE

    def profile_request(self) -> tuple[int, int, bool]:
        """(profile_seq, steps, whether this rank is to record them) of the agent; seq 0: nothing was asked for."""
        seq, steps, ranks = PROFILE.unpack_from(self._memory, PROFILE_AT)
        return seq, steps, bool(ranks >> self._local_rank & 1)

    def _publish(self, at: int, record: bytes) -> None:
        # seq goes through a memoryview of 64-bit words: one store, so a reader never sees half of it.
        index = at // SEQ_BYTES
        seq = self._words[index] // 2 * 2
        self._words[index] = seq + 1
        self._memory[at + SEQ_BYTES : at + SEQ_BYTES + len(record)] = record
        self._words[index] = seq + 2


def open_beats(shm: Path | None, *, epoch: Epoch, rank: int, local_rank: int) -> BeatWriter:
    """The writer of this rank's block, in the agent's file or, without one, in private memory.

    Raises ConfigError when the file is not one of this layout or has no block for `local_rank`.
    """
    memory = _private_memory(local_rank) if shm is None else _map_file(shm, local_rank)
    identity = Beat(attempt=epoch.attempt, generation=epoch.generation, cycle=epoch.cycle, rank=rank, pid=os.getpid())
    return BeatWriter(memory, local_rank=local_rank, beat=identity)


def _private_memory(local_rank: int) -> mmap.mmap:
    return mmap.mmap(-1, HEADER_BYTES + RANK_STRIDE * (local_rank + 1))


def _map_file(shm: Path, local_rank: int) -> mmap.mmap:
    try:
        with shm.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--shm {shm}: cannot be mapped ({error}). The agent makes this file; is it running?"
        ) from error
    needed = HEADER_BYTES + RANK_STRIDE * (local_rank + 1)
    if len(memory) < HEADER_BYTES or HEADER.unpack_from(memory, 0)[:2] != (MAGIC, VERSION) or len(memory) < needed:
        raise ConfigError(
            f"--shm {shm}: {len(memory)} bytes that are no pawl shared memory version {VERSION} with a block for local "
            f"rank {local_rank} ({needed} bytes). Agent and trainer must be of the same pawl version."
        )
    return memory
