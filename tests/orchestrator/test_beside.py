"""Copies and exports beside the training: what is due, one at a time, said when it fails and tried again later."""

import os
import sys
import time
from pathlib import Path

import pytest

from orchestrator.state.copies import Copies, Done, Due, Errand, copies_place, count_copies, due, pushed_to, url_problem
from orchestrator.state.counting import Checkpoint, Counting, CycleFence
from orchestrator.state.epochs import Epoch
from orchestrator.state.records import Event
from orchestrator.state.rundir import CheckpointName, RunPaths
from orchestrator.supervise.beside import FIRST_PAUSE_S, LONGEST_PAUSE_S, NICENESS, Beside, Result, environment
from orchestrator.views.copies import copies_of
from orchestrator.views.status import copies_text

EPOCH = Epoch(1, 1, 1)


def counting(*steps: int) -> Counting:
    """What counts, newest first."""
    found = [Checkpoint(name=CheckpointName(step=s, epoch=EPOCH).text, step=s, epoch=EPOCH) for s in steps]
    return Counting(counted=tuple(found))


def name(step: int) -> str:
    return CheckpointName(step=step, epoch=EPOCH).text


def summary(found: tuple[Due, ...]) -> list[tuple[str, int]]:
    return [(str(each.errand), each.checkpoint.step) for each in found]


def test_copies_come_before_exports_and_the_newest_first() -> None:
    both = Copies(upload_to="s3://b/x", export_interval=20)
    assert summary(due(both, counting(40, 30, 20), Done())) == [
        ("push", 40), ("push", 30), ("push", 20), ("export", 40), ("export", 20),
    ]  # fmt: skip
    some = Done(pushed=frozenset({name(40), name(20)}), exported=frozenset({40}))
    assert summary(due(both, counting(40, 30, 20), some)) == [("push", 30), ("export", 20)]
    assert due(Copies(), counting(40), Done()) == ()
    assert due(both, Counting(), Done()) == ()


def test_a_copy_elsewhere_is_no_copy_here() -> None:
    def event(url: str, step: int) -> Event:
        data = {"name": name(step), "url": url}
        return Event(epoch=EPOCH, seq=step, writer="w", unix=0.0, kind="checkpoint_uploaded", data=data)

    place = copies_place("s3://bucket/", "demo")
    assert place == "s3://bucket/demo" == Copies(upload_to="s3://bucket").place("demo")
    assert pushed_to([event(place, 10), event("s3://old/demo", 20)], place=place) == {name(10)}
    assert Copies().place("demo") is None


def test_a_copy_counts_by_the_fences_of_the_run() -> None:
    """A launch went back to 20: the copy of 30, made before, belongs to a history that never happened."""
    listing = [
        {"name": name(30), "step": 30, "num_bytes": 5, "defect": None},
        {"name": name(20), "step": 20, "num_bytes": 5, "defect": None},
        {"name": name(10), "step": 10, "num_bytes": None, "defect": "it was never completed"},
    ]
    fences = (CycleFence(epoch=EPOCH, resume_step=0), CycleFence(epoch=Epoch(1, 1, 2), resume_step=20))
    found = count_copies(listing, fences)
    assert [checkpoint.step for checkpoint in found.counted] == [20]
    assert {report.entry: report.why for report in found.reported} == {
        name(30): "a later launch went back before this step", name(10): "it was never completed",
    }  # fmt: skip


@pytest.mark.parametrize("interval", [0, -5])
def test_an_interval_below_one_is_refused(interval: int) -> None:
    with pytest.raises(ValueError, match="export_interval"):
        Copies(export_interval=interval)


class World:
    """A run directory, and a program in the place of pawl that does what the test says."""

    def __init__(self, root: Path, *, copies: Copies, body: str) -> None:
        self.paths, self.now = RunPaths(root), 1000.0
        self.paths.attempt(1).mkdir(parents=True)
        program = root / "program.py"
        program.write_text(f"import os, sys, time\n{body}\n")
        self.beside = Beside(
            self.paths, copies, attempt=1, program=(sys.executable, str(program)), clock=lambda: self.now
        )

    def until_ended(self, what: Counting) -> Result:
        for _ in range(400):
            found = self.beside.turn(what)
            if found is not None:
                return found
            time.sleep(0.02)
        raise AssertionError("it never ended")


def test_one_command_at_a_time_with_the_checkpoint_named_as_busy(tmp_path: Path) -> None:
    world = World(tmp_path, copies=Copies(upload_to="s3://b"), body="print(' '.join(sys.argv[1:3]))")
    assert world.beside.turn(counting(20, 10)) is None and world.beside.busy_with == name(20)
    first = world.until_ended(counting(20, 10))
    assert first == Result(what="push", name=name(20), code=0, why="ckpt push") and world.beside.busy_with is None
    assert world.until_ended(counting(20, 10)).name == name(10)
    assert world.beside.turn(counting(20, 10)) is None and not world.beside.is_running, "nothing is due any more"


def test_what_fails_is_told_and_tried_again_after_growing_pauses(tmp_path: Path) -> None:
    world = World(tmp_path, copies=Copies(upload_to="s3://b"), body="print('no'); sys.exit('the bucket is gone')")
    pause = FIRST_PAUSE_S
    for _ in range(9):
        result = world.until_ended(counting(20))
        assert (result.code, result.why) == (1, "the bucket is gone")
        assert result.ledger_data() == {"errand": "push", "name": name(20), "reason": "the bucket is gone"}
        world.now += pause - 1
        assert world.beside.turn(counting(20)) is None and not world.beside.is_running
        world.now += 1
        pause = min(2 * pause, LONGEST_PAUSE_S)
    assert pause == LONGEST_PAUSE_S


def test_an_export_is_due_until_its_folder_is_there(tmp_path: Path) -> None:
    body = "out = sys.argv[sys.argv.index('--out') + 1]\nos.mkdir(out)"
    world = World(tmp_path, copies=Copies(export_interval=10), body=body)
    assert world.until_ended(counting(20, 15)).what == "export"
    assert (tmp_path / "exports" / "step-000000020").is_dir()
    assert world.beside.due(counting(20, 15)) == ()


def test_a_command_is_not_one_of_the_jobs_processes_and_gives_way(tmp_path: Path) -> None:
    kept = environment({"PAWL_NONCE": "n", "SLURM_JOB_ID": "7", "RANK": "1", "AWS_PROFILE": "p", "PATH": "/bin"})
    assert kept == {"AWS_PROFILE": "p", "PATH": "/bin", "PYTHONSAFEPATH": "1"}
    world = World(tmp_path, copies=Copies(upload_to="s3://b"), body="time.sleep(0.5); print(os.nice(0))")
    assert int(world.until_ended(counting(20)).why) == os.nice(0) + NICENESS


def test_stopping_kills_what_runs(tmp_path: Path) -> None:
    world = World(tmp_path, copies=Copies(upload_to="s3://b"), body="time.sleep(600)")
    world.beside.turn(counting(20))
    began = time.monotonic()
    world.beside.stop()
    assert time.monotonic() - began < 10 and not world.beside.is_running
    world.beside.stop()


def test_a_fetch_is_one_command(tmp_path: Path) -> None:
    world = World(tmp_path, copies=Copies(upload_to="s3://b"), body="print(' '.join(sys.argv[1:]))")
    world.beside.fetch()
    result = world.until_ended(Counting())
    assert (result.what, result.why, result.code) == ("pull", f"ckpt pull {tmp_path}", 0)


@pytest.mark.parametrize(
    "url",
    ["copies/here", "/tmp/x", "s3://", "s3://key:secret@b", "https://h/x?sig=secret", "file:///a\nb", "memory://x", ""],
)
def test_a_place_that_cannot_be_meant_is_refused_without_being_shown(url: str) -> None:
    problem = url_problem(url)
    assert problem is not None and "secret" not in problem


@pytest.mark.parametrize("url", ["s3://bucket/runs", "gs://b", "file:///scratch/copies"])
def test_a_good_place_is_one(url: str) -> None:
    assert url_problem(url) is None


def test_status_knows_the_newest_copy_and_what_failed_since() -> None:
    def event(seq: int, kind: str, **data: object) -> Event:
        return Event(epoch=EPOCH, seq=seq, writer="w", unix=0.0, kind=kind, data=data)

    assert copies_of([]) is None
    failed = event(1, "errand_failed", errand="push", name=name(10), reason="no such bucket")
    view = copies_of([failed])
    assert view is not None and (view.count, view.newest_step) == (0, None)
    assert copies_text(view).plain == f"none yet\npush {name(10)} failed: no such bucket"
    pushed = [event(step, "checkpoint_uploaded", name=name(step), url="s3://b/demo") for step in (20, 10)]
    good = copies_of([failed, *pushed])
    assert good is not None and copies_text(good).plain == "2 at s3://b/demo, the newest of step 20"


def test_errands_are_words() -> None:
    assert {str(errand) for errand in Errand} == {"push", "export"}
