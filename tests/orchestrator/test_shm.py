"""The byte layout of shared memory, and that a torn, foreign or unwritten record is Unreadable, never a value."""

import os
import struct
import zlib

import pytest

from orchestrator.agent import shm
from orchestrator.agent.main import _earlier_nonces
from orchestrator.state.codec import dumps
from orchestrator.state.epochs import Epoch
from orchestrator.state.records import Intent, Unreadable
from orchestrator.state.rundir import RunPaths, make_attempt, make_layout


def beat_bytes(*, seq=4, epoch=(3, 1, 2), rank=5, pid=77, phase=3, step=40, since=9, loss=2.5, tokens=1000):
    body = struct.pack("<IIIIIIQQQQQdQ", *epoch, rank, pid, phase, step, 11, since, 12, 1, loss, tokens)
    body += bytes(124 - 8 - len(body))
    return struct.pack("<Q", seq) + body + struct.pack("<I", zlib.crc32(body))


def stats_bytes(*, seq=2):
    scalars = struct.pack("<QQQdddQQQdQdQd", 7, 700, 70, 1e9, 3.5, 0.25, 0, 1, 2, 0.5, 5, 1.7e9, 4096, float("nan"))
    scalars += struct.pack("<dddddQQdd", 2.5, 1.0, 1e-3, 200.0, float("nan"), 10, 20, 0.5, 1.7e9)
    body = scalars + struct.pack("<24Q", *range(24)) + struct.pack("<Qdd", 3, 1.5, 2.25)
    body += bytes(892 - 8 - len(body))
    return struct.pack("<Q", seq) + body + struct.pack("<I", zlib.crc32(body))


def test_a_beat_is_read_field_by_field():
    beat = shm.parse_beat(beat_bytes())
    assert isinstance(beat, shm.Beat)
    assert beat.epoch == Epoch(3, 1, 2)
    assert (beat.rank, beat.pid, beat.phase, beat.step) == (5, 77, shm.Phase.STEP, 40)
    assert (beat.beat_monotonic_ns, beat.phase_since_ns, beat.collective_seq, beat.control_ack) == (11, 9, 12, 1)
    assert (beat.loss, beat.tokens) == (2.5, 1000)


def test_stats_are_read_at_the_agreed_offsets():
    raw = stats_bytes()
    stats = shm.parse_stats(raw)
    assert isinstance(stats, shm.Stats)
    assert (stats.steps_total, stats.tokens_total, stats.samples_total) == (7, 700, 70)
    assert stats.loss == struct.unpack_from("<d", raw, 120)[0]
    assert stats.mfu != stats.mfu
    assert stats.last_step_seconds == struct.unpack_from("<d", raw, 176)[0] == 0.5
    passes = (stats.validation_passes_total, stats.validation_seconds_total, stats.validation_loss)
    assert passes == (3, 1.5, 2.25) and stats.validation_loss == struct.unpack_from("<d", raw, 400)[0]
    assert stats.step_buckets == tuple(range(24)) and len(shm.STEP_BUCKET_BOUNDS_S) == 24


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (bytes(128), "never written"),
        (beat_bytes(seq=5), "being written"),
        (beat_bytes()[:60] + b"\xff" + beat_bytes()[61:], "wrong checksum"),
        (beat_bytes()[:100], "100 bytes"),
        (beat_bytes(phase=99), "phase 99"),
    ],
)
def test_what_is_not_a_stable_beat_is_unreadable(raw, why):
    found = shm.parse_beat(raw)
    assert isinstance(found, Unreadable) and why in found.why


def test_the_agents_file_holds_header_control_and_blocks(tmp_path):
    memory = shm.NodeMemory.create(tmp_path / "node", num_ranks=2)
    try:
        raw = memory.path.read_bytes()
        assert struct.unpack_from("<8sIIII", raw) == (b"PAWLSHM1", 1, 2, 1024, 256)
        assert len(raw) == 256 + 2 * 1024
        assert memory.path.stat().st_mode & 0o777 == 0o600
        assert memory.write_control(shm.ControlWord.DRAIN) == 1
        assert struct.unpack_from("<QI", memory.path.read_bytes(), 64) == (1, 2)
        with memory.path.open("r+b") as file:
            file.seek(256 + 1024)
            file.write(beat_bytes() + stats_bytes())
        assert isinstance(memory.read_beat(0), Unreadable)
        assert isinstance(memory.read_beat(1), shm.Beat)
        assert isinstance(memory.read_stats(1), shm.Stats)
    finally:
        memory.close()


def test_a_new_cycle_gets_a_new_file_that_old_ranks_cannot_reach(tmp_path):
    """H3 (loom#4400)."""
    first = shm.NodeMemory.create(tmp_path / "node", num_ranks=1)
    with first.path.open("r+b") as zombie:
        second = shm.NodeMemory.create(tmp_path / "node", num_ranks=1)
        zombie.seek(256)
        zombie.write(beat_bytes())
        zombie.flush()
        assert isinstance(first.read_beat(0), shm.Beat)
        assert isinstance(second.read_beat(0), Unreadable)
    first.close()
    second.unlink()
    second.unlink()
    second.close()
    assert not (tmp_path / "node").exists()


def test_files_of_attempts_that_are_over_are_removed_and_no_others():
    over, lives = (f"{name}{os.getpid()}" for name in ("over", "lives"))
    files = [shm.path_of(uid=os.getuid(), nonce=nonce, node=node) for nonce in (over, lives) for node in ("n0", "n1")]
    try:
        for file in files:
            file.touch()
        assert shm.remove_left(uid=os.getuid(), nonces=(over, "*", "../x", "")) == 2
        assert [file.exists() for file in files] == [False, False, True, True]
    finally:
        for file in files:
            file.unlink(missing_ok=True)


def test_an_agent_removes_what_the_attempts_before_its_own_left(tmp_path):
    paths = RunPaths(tmp_path / "run")
    make_layout(paths)
    for number in (1, 2, 4):
        make_attempt(paths, number)
        intent = Intent(attempt=number, nonce=f"n{number}", launcher="local", by="", created_unix=1.0, exclude=())
        paths.intent(number).write_text(dumps(intent))
    paths.intent(2).write_bytes(b"\xff")
    assert list(_earlier_nonces(paths, 4)) == ["n1"]
