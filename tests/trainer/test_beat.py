"""Beats: what is in the bytes, that a reader never sees half of one, and what cannot be mapped."""

import math
import mmap
import struct
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest

from trainer.beat import (
    CONTROL,
    CONTROL_AT,
    HEADER,
    HEADER_BYTES,
    HISTOGRAM_BOUNDS_S,
    MAGIC,
    RANK_STRIDE,
    BeatWriter,
    Phase,
    Stats,
    Word,
    encode_beat,
    encode_stats,
    open_beats,
)
from trainer.errors import ConfigError
from trainer.records import Epoch

EPOCH = Epoch(attempt=3, generation=1, cycle=2)


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    path = tmp_path / "shm"
    path.write_bytes(HEADER.pack(MAGIC, 1, 2, RANK_STRIDE, HEADER_BYTES).ljust(HEADER_BYTES + 2 * RANK_STRIDE, b"\0"))
    return path


def block(shm: Path, local_rank: int) -> bytes:
    at = HEADER_BYTES + RANK_STRIDE * local_rank
    return shm.read_bytes()[at : at + RANK_STRIDE]


def test_opening_publishes_who_and_that_it_starts(shm: Path) -> None:
    open_beats(shm, epoch=EPOCH, rank=7, local_rank=1)
    beat = block(shm, 1)[:128]
    assert struct.unpack_from("<Q4I", beat) == (2, 3, 1, 2, 7)
    assert struct.unpack_from("<I", beat, 28)[0] == Phase.INIT
    assert math.isnan(struct.unpack_from("<d", beat, 72)[0])
    assert struct.unpack_from("<I", beat, 124)[0] == zlib.crc32(beat[8:124])
    assert block(shm, 0) == bytes(RANK_STRIDE), "a rank writes its own block and no other"
    assert shm.read_bytes()[:HEADER_BYTES] == HEADER.pack(MAGIC, 1, 2, RANK_STRIDE, HEADER_BYTES).ljust(256, b"\0")


def test_phase_since_moves_with_the_phase_only(shm: Path) -> None:
    times = iter(range(100, 200))
    first = open_beats(shm, epoch=EPOCH, rank=0, local_rank=0)
    writer = BeatWriter(first._memory, local_rank=0, beat=first._beat, clock_ns=lambda: next(times))

    def published() -> tuple[int, int, int, int]:
        phase, step, beat_ns, since_ns = struct.unpack_from("<IQQQ", block(shm, 0), 28)
        return phase, step, beat_ns, since_ns

    writer.beat(Phase.STEP, step=4)
    assert published() == (Phase.STEP, 4, 102, 102)
    writer.beat(Phase.STEP, step=5)
    assert published() == (Phase.STEP, 5, 103, 102)
    writer.beat(collective_seq=9)
    assert published() == (Phase.STEP, 5, 104, 102)
    writer.beat(Phase.SAVE)
    assert published() == (Phase.SAVE, 5, 105, 105)


def test_a_reader_never_takes_a_torn_beat_for_a_whole_one(shm: Path) -> None:
    """A writer beats with step = tokens as fast as it can; every beat that verifies has step == tokens."""
    writer = open_beats(shm, epoch=EPOCH, rank=0, local_rank=0)
    writer.beat(step=0, tokens=0)
    stop = threading.Event()

    def write() -> None:
        step = 0
        while not stop.is_set():
            step += 1
            writer.beat(step=step, tokens=step)

    thread = threading.Thread(target=write)
    thread.start()
    whole = 0
    try:
        for _ in range(3000):
            beat = block(shm, 0)[:128]
            if struct.unpack_from("<Q", beat)[0] % 2 or struct.unpack_from("<I", beat, 124)[0] != zlib.crc32(
                beat[8:124]
            ):
                continue
            whole += 1
            assert struct.unpack_from("<Q", beat, 32) == struct.unpack_from("<Q", beat, 80)
    finally:
        stop.set()
        thread.join()
    assert whole > 100


def test_seq_is_odd_while_a_record_is_being_written(shm: Path) -> None:
    """The checksum is a second net: alone it would let 1 torn record in 2^32 pass."""
    during: list[int] = []

    class Watched(mmap.mmap):
        def __setitem__(self, where: Any, value: Any) -> None:
            during.append(struct.unpack_from("<Q", self, where.start - 8)[0])
            super().__setitem__(where, value)

    with shm.open("r+b") as file:
        memory = Watched(file.fileno(), 0)
    writer = BeatWriter(memory, local_rank=1, beat=open_beats(None, epoch=EPOCH, rank=7, local_rank=1)._beat)
    writer.beat(Phase.STEP)
    writer.publish_stats()
    assert during == [1, 3, 1]
    assert [struct.unpack_from("<Q", block(shm, 1), at)[0] for at in (0, 128)] == [4, 2]


def test_control_word_is_read_and_an_unknown_one_is_none(shm: Path) -> None:
    writer = open_beats(shm, epoch=EPOCH, rank=0, local_rank=0)
    assert writer.control() == (0, Word.NONE)
    for word, read in ((1, Word.SAVE), (2, Word.DRAIN), (9, Word.NONE)):
        with shm.open("r+b") as file:
            file.seek(CONTROL_AT)
            file.write(CONTROL.pack(5, word))
        assert writer.control() == (5, read)


def test_without_shared_memory_the_same_calls_work() -> None:
    writer = open_beats(None, epoch=EPOCH, rank=3, local_rank=3)
    writer.beat(Phase.SAVE, step=12)
    writer.publish_stats()
    assert (writer.phase, writer.step, writer.control()) == (Phase.SAVE, 12, (0, Word.NONE))


@pytest.mark.parametrize("content", [None, b"", b"short", bytes(5000), HEADER.pack(MAGIC, 2, 1, 1024, 256).ljust(5000)])
def test_a_file_that_is_no_shared_memory_of_ours_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "shm"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="--shm"):
        open_beats(path, epoch=EPOCH, rank=0, local_rank=0)


def test_a_local_rank_without_a_block_is_refused(shm: Path) -> None:
    with pytest.raises(ConfigError, match="local rank 2"):
        open_beats(shm, epoch=EPOCH, rank=2, local_rank=2)


def test_record_sizes() -> None:
    writer = open_beats(None, epoch=EPOCH, rank=0, local_rank=0)
    assert len(encode_beat(writer._beat)) == 128 - 8
    assert len(encode_stats(Stats())) == 896 - 8


def test_each_step_duration_falls_into_one_bucket() -> None:
    stats = Stats()
    for seconds in (0.0, 0.01, 0.011, 1.0, 299.0, 300.0, 301.0):
        stats.observe_step_seconds(seconds)
    counts = dict(zip(HISTOGRAM_BOUNDS_S, stats.step_seconds_histogram, strict=True))
    assert {bound: count for bound, count in counts.items() if count} == {
        0.01: 2, 0.025: 1, 1.0: 1, 300.0: 2, math.inf: 1,
    }  # fmt: skip
    assert stats.step_seconds_sum == pytest.approx(901.021)
    assert stats.last_step_seconds == 301.0
