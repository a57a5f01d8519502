"""What retention leaves, and that a deletion killed, interrupted or overtaken at any operation loses nothing."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orch_worlds as w
import pytest
from checkpoint_folders import names, save, start
from crash_shim import STORAGE_ERRORS, fail_at_each, kill_at_each
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.control.observe import count_checkpoints
from orchestrator.errors import PawlError
from orchestrator.state import gc
from orchestrator.state.epochs import Epoch
from orchestrator.state.ledger import Ledger, read_all
from orchestrator.state.retention import Retention, kept_by_name, plan_deletion
from orchestrator.state.rundir import RunPaths, make_attempt, make_layout

E1, E2 = Epoch(1, 1, 1), Epoch(1, 1, 2)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return world(tmp_path / "x")


def world(root: Path, *steps: int) -> RunPaths:
    """A run whose first launch has written these checkpoints, and left a piece of an earlier deletion."""
    found = RunPaths(root)
    make_layout(found)
    make_attempt(found, 1)
    start(found, E1, None)
    for step in steps or (1, 2, 3, 4, 5):
        save(found, step)
    (found.trash(w.name(9)) / "deep").mkdir(parents=True)
    (found.trash(w.name(9)) / "deep" / "file").write_text("x")
    return found


def collect(paths: RunPaths, *, epoch: Epoch = E1, keep_last: int = 2) -> gc.Collected:
    return gc.collect(paths, epoch=epoch, retention=Retention(keep_last=keep_last), resumed_from=None, run="x")


def keep(paths: RunPaths, step: int, kind: str = "checkpoint_kept") -> None:
    Ledger(paths.root, "cli-x").append(E1, kind, {"name": w.name(step), "label": "paper", "by": "ada"})


def newest(paths: RunPaths) -> list[int]:
    counting = count_checkpoints(paths, run="x")
    assert counting is not None
    return [checkpoint.step for checkpoint in counting.counted]


def test_multiples_of_keep_every_stay_for_ever() -> None:
    counting = w.counting(*range(10, 101, 10))
    plan = plan_deletion(counting, (), retention=Retention(keep_last=3, keep_every=40), resumed_from=w.name(20))
    assert plan.delete == tuple(map(w.name, (70, 60, 50, 30, 10)))
    why = dict(plan.kept)
    assert why[w.name(40)] == "its step is a multiple of keep_every, 40 steps"
    assert why[w.name(20)] == "the newest launch resumed from it" and why[w.name(80)] == "one of the last 3"


@settings(max_examples=60, deadline=None)
@given(
    st.sets(st.integers(1, 60), max_size=9), st.integers(2, 6), st.none() | st.integers(1, 9),
    st.none() | st.integers(1, 60), st.sets(st.integers(1, 60), max_size=3),
)  # fmt: skip
def test_each_reason_alone_keeps_a_checkpoint(
    steps: set[int], last: int, every: int | None, resumed: int | None, kept: set[int]
) -> None:
    counting = w.counting(*steps)
    plan = plan_deletion(
        counting,
        (),
        retention=Retention(keep_last=last, keep_every=every),
        resumed_from=None if resumed is None else w.name(resumed),
        kept=frozenset(map(w.name, kept)),
    )
    stay = {*sorted(steps)[-last:], *(step for step in steps if every and step % every == 0)}
    stay |= {resumed, *kept} & steps
    assert set(plan.delete) == {w.name(step) for step in steps - stay}


def test_a_kept_checkpoint_stays_until_it_is_released(paths: RunPaths) -> None:
    keep(paths, 1)
    assert kept_by_name(read_all(paths.root)) == {w.name(1): "paper"}
    assert set(collect(paths).deleted) == {w.name(2), w.name(3)} and w.name(1) in names(paths)
    keep(paths, 1, "checkpoint_released")
    assert collect(paths).deleted == (w.name(1),)


def test_what_is_being_copied_stays_until_the_next_time(paths: RunPaths) -> None:
    retention, in_use = Retention(), frozenset({w.name(2)})
    done = gc.collect(paths, epoch=E1, retention=retention, resumed_from=None, run="x", in_use=in_use)
    assert dict(done.plan.kept)[w.name(2)] == "it is being copied or exported" and newest(paths) == [5, 4, 2]
    assert collect(paths).deleted == (w.name(2),)


def test_nothing_goes_while_it_is_unknown_what_is_kept(paths: RunPaths) -> None:
    keep(paths, 1)
    (paths.ledger / "cli-x.jsonl").write_bytes(b"\xff\xfe\n")
    assert collect(paths).deleted == () and newest(paths) == [5, 4, 3, 2, 1]


def at_rename(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None]) -> None:
    """Let something happen just after the next rename."""
    real = os.rename

    def rename(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        monkeypatch.setattr(os, "rename", real)
        happens()

    monkeypatch.setattr(os, "rename", rename)


def test_what_a_person_keeps_in_the_very_moment_comes_back(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    at_rename(monkeypatch, lambda: keep(paths, 1))
    assert set(collect(paths).deleted) == {w.name(2), w.name(3)}
    assert newest(paths) == [5, 4, 1]


def test_a_zombie_that_wakes_up_in_mid_deletion_puts_back_what_it_took(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older epoch deletes late: a launch that began meanwhile resumed from the very checkpoint."""
    at_rename(monkeypatch, lambda: start(paths, E2, w.name(1)))
    before = names(paths)
    with pytest.raises(PawlError, match="later than this one"):
        collect(paths, epoch=E1)
    assert names(paths) == before


def test_a_zombie_deletes_nothing_even_when_it_planned_before(paths: RunPaths) -> None:
    start(paths, E2, w.name(2))
    save(paths, 3, E2)
    before = names(paths)
    for act in (lambda: collect(paths, epoch=E1), lambda: gc.to_trash(paths, w.name(1), epoch=E1)):
        with pytest.raises(PawlError, match="later than this one"):
            act()
    assert names(paths) == before


def whole(paths: RunPaths) -> None:
    """The newest two count and every byte of them is there; a next collection finishes the work."""
    assert newest(paths)[:2] == [5, 4]
    for step in (4, 5):
        folder = paths.checkpoint(w.name(step))
        assert {file.name for file in folder.iterdir()} == {"manifest.json", "rank-00000.safetensors"}
        assert (folder / "rank-00000.safetensors").read_bytes() == b"1234"
    assert not collect(paths).left
    assert names(paths) == {w.name(4), w.name(5)}


def test_a_kill_at_any_operation_leaves_the_last_two(tmp_path: Path) -> None:
    operations = kill_at_each(
        lambda at: world(tmp_path / f"kill-{at}", 3, 4, 5).root,
        lambda folder: collect(RunPaths(folder)),
        lambda folder, _: whole(RunPaths(folder)),
    )
    assert [verb for verb, path in operations if path.endswith(w.name(3))].count("rename") == 1
    assert {"rename", "fsync", "unlink", "rmdir"} <= {verb for verb, _ in operations}


@pytest.mark.parametrize("number", STORAGE_ERRORS)
def test_an_error_at_any_operation_leaves_the_last_two(tmp_path: Path, number: int) -> None:
    def check(folder: Path, _stopped: object, raised: BaseException | None) -> None:
        assert raised is None or isinstance(raised, OSError | PawlError)
        whole(RunPaths(folder))

    operations = fail_at_each(
        lambda at: world(tmp_path / f"error-{at}", 3, 4, 5).root,
        lambda folder: collect(RunPaths(folder)),
        check,
        number=number,
    )
    assert len(operations) > 30


def test_r20_a_save_that_fails_on_a_full_disk_costs_no_older_checkpoint(paths: RunPaths) -> None:
    """R20 (SimpleTuner#2989). keep 3; the save of step 6 fails with ENOSPC: its folder is unfinished, then gone."""
    before = newest(paths)[:3]
    partial = paths.partial(w.name(6))
    partial.mkdir()
    (partial / "rank-00000.safetensors").write_bytes(b"12")
    collect(paths, keep_last=3)
    assert newest(paths) == before and partial.exists()
    gc.remove(partial)
    collect(paths, keep_last=3)
    assert newest(paths) == before


def test_r20_a_folder_of_an_old_run_takes_no_slot_and_zero_keeps_all(paths: RunPaths) -> None:
    """R20 (unsloth-zoo#782). A folder of another run with step 5000 counts for nothing; keep 0 deletes nothing."""
    stale = save(paths, 5000, Epoch(8, 1, 1), run="old")
    assert collect(paths, keep_last=0).deleted == ()
    collect(paths, keep_last=3)
    assert newest(paths) == [5, 4, 3] and stale.exists()
    start(paths, E2, w.name(5))
    for step in (6, 7, 8):
        save(paths, step, E2)
    gc.collect(paths, epoch=E2, retention=Retention(keep_last=2), resumed_from=w.name(5), run="x")
    assert newest(paths) == [8, 7, 5] and stale.exists()


@pytest.mark.parametrize("values", [{"keep_last": -1}, {"keep_every": 0}])
def test_numbers_that_mean_nothing_are_refused(values: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        Retention(**values)
