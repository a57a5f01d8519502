"""Retention: what may go, what never goes, and that a process of the past deletes nothing."""

import json
from pathlib import Path

import orch_worlds as w
import pytest
from checkpoint_folders import names, save, start
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.control.observe import count_checkpoints, scan_checkpoints
from orchestrator.errors import PawlError
from orchestrator.state.counting import Counting
from orchestrator.state.epochs import Epoch
from orchestrator.state.gc import collect, quarantine
from orchestrator.state.retention import Retention, plan_deletion
from orchestrator.state.rundir import RunPaths, make_attempt, make_layout

E1, E2 = Epoch(1, 1, 1), Epoch(1, 1, 2)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    found = RunPaths(tmp_path / "x")
    make_layout(found)
    make_attempt(found, 1)
    start(found, E1, None)
    return found


def test_r20_the_newest_stay_and_older_ones_go(paths: RunPaths) -> None:
    for step in (1, 2, 3, 4, 5):
        save(paths, step)
    collect(paths, epoch=E1, retention=Retention(keep_last=3), resumed_from=None, run="x")
    assert names(paths) == {w.name(step) for step in (3, 4, 5)}


def test_r20_nothing_goes_while_the_new_one_is_not_complete(paths: RunPaths) -> None:
    """R20 (SimpleTuner#2989). Old checkpoints were deleted before the new one was safe. Here its disk is full."""
    for step in (1, 2):
        save(paths, step)
    paths.partial(w.name(3)).mkdir()
    cut = save(paths, 4)
    (cut / "rank-00000.safetensors").write_bytes(b"12")
    before = names(paths)
    collect(paths, epoch=E1, retention=Retention(keep_last=1), resumed_from=None, run="x")
    assert names(paths) == before


def test_r20_a_higher_step_of_an_old_run_takes_no_slot_and_is_not_deleted(paths: RunPaths) -> None:
    """R20 (unsloth-zoo#782). A stale folder with step 5000 took a place for ever."""
    save(paths, 5000, Epoch(8, 1, 1), run="old")
    for step in (1, 2, 3):
        save(paths, step)
    collect(paths, epoch=E1, retention=Retention(keep_last=2), resumed_from=None, run="x")
    assert names(paths) == {w.name(2), w.name(3), w.name(5000, Epoch(8, 1, 1))}


def test_r20_zero_keeps_all_and_a_negative_number_is_refused(paths: RunPaths) -> None:
    for step in (1, 2, 3):
        save(paths, step)
    assert not collect(paths, epoch=E1, retention=Retention(keep_last=0), resumed_from=None, run="x").deleted
    with pytest.raises(ValueError, match="keep_last"):
        Retention(keep_last=-1)


def test_r20_what_the_running_launch_resumed_from_stays(paths: RunPaths) -> None:
    for step in (1, 2, 3, 4):
        save(paths, step)
    start(paths, E2, w.name(4))
    for step in (5, 6):
        save(paths, step, E2)
    collect(paths, epoch=E2, retention=Retention(keep_last=1), resumed_from=w.name(1), run="x")
    assert names(paths) == {w.name(1), w.name(5, E2), w.name(6, E2)}


def test_a_process_of_the_past_deletes_nothing(paths: RunPaths) -> None:
    for step in (1, 2, 3):
        save(paths, step)
    start(paths, E2, w.name(3))
    with pytest.raises(PawlError, match="later than this one"):
        collect(paths, epoch=E1, retention=Retention(keep_last=2), resumed_from=None, run="x")
    with pytest.raises(PawlError, match="later than this one"):
        quarantine(paths, w.name(3), epoch=E1)
    assert len(names(paths)) == 3


def test_leftovers_go_partials_only_once_a_newer_launch_has_committed(paths: RunPaths) -> None:
    paths.trash(w.name(1)).mkdir()
    paths.partial(w.name(5)).mkdir()
    collect(paths, epoch=E1, retention=Retention(keep_last=2), resumed_from=None, run="x")
    assert names(paths) == {f".{w.name(5)}.partial"}
    start(paths, E2, None)
    save(paths, 1, E2)
    collect(paths, epoch=E2, retention=Retention(keep_last=2), resumed_from=None, run="x")
    assert names(paths) == {w.name(1, E2)}


def test_a_bad_checkpoint_is_set_aside_not_deleted(paths: RunPaths) -> None:
    save(paths, 1)
    save(paths, 2)
    assert quarantine(paths, w.name(2), epoch=E1) == quarantine(paths, w.name(2), epoch=E1)
    assert names(paths) == {w.name(1), f".quarantine-{w.name(2)}"}
    counting = count_checkpoints(paths, run="x")
    assert counting is not None and counting.newest is not None and counting.newest.step == 1
    with pytest.raises(PawlError, match="no checkpoint"):
        quarantine(paths, "../../etc", epoch=E1)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda f: (f / "manifest.json").unlink(), "manifest.json"),
        (lambda f: (f / "manifest.json").write_text("{}"), "schema_version"),
        (lambda f: (f / "rank-00000.safetensors").unlink(), "rank-00000.safetensors: No such file"),
        (lambda f: (f / "rank-00000.safetensors").write_bytes(b""), "has 0 bytes"),
        (
            lambda f: (f / "manifest.json").write_text(
                json.dumps(json.loads((f / "manifest.json").read_text()) | {"step": 9})
            ),
            "of step 9",
        ),
        (
            lambda f: (f / "manifest.json").write_text(
                (f / "manifest.json").read_text().replace("rank-00000", "../rank-00000")
            ),
            "no plain file name",
        ),
    ],
)
def test_a_checkpoint_that_is_not_whole_says_what_is_wrong(paths: RunPaths, damage: object, why: str) -> None:
    folder = save(paths, 3)
    damage(folder)  # type: ignore[operator]
    entries = scan_checkpoints(paths)
    assert entries is not None and entries[0].defect is not None and why in entries[0].defect


@settings(max_examples=50, deadline=None)
@given(st.sets(st.integers(1, 50), max_size=8), st.integers(0, 6), st.none() | st.integers(1, 50))
def test_the_last_two_that_count_never_go(steps: set[int], keep: int, resumed: int | None) -> None:
    counting = w.counting(*steps)
    from_name = None if resumed is None else w.name(resumed)
    plan = plan_deletion(counting, (), retention=Retention(keep_last=keep), resumed_from=from_name)
    safe = [checkpoint.name for checkpoint in counting.counted[: max(2, keep)]]
    assert not set(plan.delete) & {*safe, from_name}
    assert {*plan.delete, *(name for name, _ in plan.kept)} == {checkpoint.name for checkpoint in counting.counted}
    left = [checkpoint for checkpoint in counting.counted if checkpoint.name not in plan.delete]
    assert (
        plan_deletion(
            Counting(counted=tuple(left)), (), retention=Retention(keep_last=keep), resumed_from=from_name
        ).delete
        == ()
    )


def test_an_undecided_count_deletes_nothing() -> None:
    counting = Counting(counted=w.counting(1, 2, 3).counted, undecided=(E2,))
    assert plan_deletion(counting, (), retention=Retention(keep_last=1), resumed_from=None).delete == ()
