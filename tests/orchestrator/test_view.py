"""The view says what the records say: unknown is None, stale is marked, nothing damaged raises."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_factory import T0, Story
from run_stories import clean, crash_loop, rough

from orchestrator.agent.record import NodeRecord, RankPlace, write_record
from orchestrator.state.epochs import Epoch
from orchestrator.state.rundir import RunPaths
from orchestrator.state.train_lines import (
    StepLine,
    last_written_step,
    merge_steps,
    parse_step_lines,
    parse_validation_lines,
)
from orchestrator.views.explain import explanation
from orchestrator.views.read import read_run
from orchestrator.views.records import RunState, RunView
from orchestrator.views.run_view import RunInputs, build_view, run_steps, run_view, to_json


def view_of(story: Story, **changes: object) -> RunView:
    inputs = RunInputs(now=story.now, run_dir="/runs/x", events=tuple(story.events), lines=story.step_lines())
    return build_view(replace(inputs, **changes))  # type: ignore[arg-type]


def test_a_finished_run(tmp_path: Path) -> None:
    story = clean()
    view = run_view(story.write(tmp_path), now=story.now)
    assert view.state is RunState.DONE
    assert (view.progress.step, view.progress.train_steps, view.progress.tokens) == (60, 60, 60 * 4096)
    assert view.progress.stale
    assert view.progress.eta_s is None
    assert view.world_size == 4
    assert [c.step for c in view.checkpoints if c.counts] == [60, 50, 40, 30, 20, 10]
    assert view.problems == ()


def test_a_rough_run_lists_incidents_with_cost_and_decision(tmp_path: Path) -> None:
    story = rough()
    view = run_view(story.write(tmp_path), now=story.now)
    first, second = view.incidents
    assert (first.failure_class, first.level, first.node, first.rank) == ("node_down", "L2", "node1", None)
    assert first.cost is not None
    assert (first.cost.detection_s, first.cost.teardown_s, first.cost.lost_steps) == (3.5, 0.75, 3)
    assert first.decision is not None
    assert first.decision.exclude == ("node1",)
    assert second.cost is not None
    assert second.cost.backoff_s == 2.0
    assert view.progress.recomputed_steps == 8
    assert {node.name: node.role for node in view.nodes} == {"node0": "train", "node2": "train", "node1": "excluded"}


def test_a_held_run_says_why(tmp_path: Path) -> None:
    story = crash_loop()
    view = run_view(story.write(tmp_path), now=story.now)
    assert view.state is RunState.HELD
    assert view.stop is not None
    assert view.stop.rule == "crash-loop"
    assert view.stop.hint


def test_a_run_that_was_never_started_is_unknown_not_done() -> None:
    view = build_view(RunInputs(now=T0, run_dir="/runs/new"))
    assert view.state is RunState.UNKNOWN
    assert (view.run, view.progress.step, view.progress.loss, view.mesh) == ("new", None, None, None)


@pytest.mark.parametrize("kind", ["drained", "cancelled"])
def test_parked_at_a_persons_word_is_not_shown_as_held(kind: str) -> None:
    story = Story()
    story.create()
    story.attempt()
    story.cycle()
    story.end(kind)
    story.event("run_held", {"rule": kind, "reason": f"a person asked: {kind}", "hint": ""})
    assert view_of(story).state == kind


def running(story: Story | None = None) -> Story:
    told = story or Story()
    told.create()
    told.attempt()
    told.cycle()
    told.steps(14)
    return told


def test_a_running_run_has_a_pace_and_an_eta() -> None:
    story = running()
    facts = read_facts(story)
    view = view_of(story, facts=facts)
    assert view.state is RunState.TRAINING
    assert not view.progress.stale
    assert view.progress.eta_s == pytest.approx(45 * (0.5 + 0.125 / 14), rel=1e-3)


def read_facts(story: Story) -> object:
    from orchestrator.state.records import parse_launch_facts

    return parse_launch_facts(json.dumps(story.facts()))


def test_old_numbers_are_marked_stale_and_give_no_eta() -> None:
    story = running()
    view = view_of(story, now=story.now + 3600, facts=read_facts(story))
    assert view.progress.stale
    assert view.progress.eta_s is None
    assert view.progress.loss is not None


def test_a_dead_supervisor_makes_a_run_lost_not_failed() -> None:
    assert view_of(running(), supervisor_alive=False).state is RunState.LOST
    assert view_of(running(), supervisor_alive=None).state is RunState.TRAINING


def test_steps_before_a_rollback_that_were_not_repeated_yet_do_not_count() -> None:
    story = running()
    story.fault(
        incident="i1", cls="unknown", level="L1", node="node0", rank=0, phase="step", message="x", detection_s=1.0
    )
    story.cycle(incident="i1", level="L1")
    merged = run_steps(story.step_lines(), story.events)
    assert [line.step for line in merged.kept] == list(range(1, 12))
    assert [line.step for line in merged.recomputed] == [11, 12, 13, 14, 15]
    assert view_of(story).progress.step == 11


def test_the_view_is_json(tmp_path: Path) -> None:
    story = rough()
    view = run_view(story.write(tmp_path), now=story.now)
    text = json.dumps(to_json(view), allow_nan=False)
    assert json.loads(text)["state"] == "done"


def test_damage_is_named_and_never_raises(tmp_path: Path) -> None:
    story = rough()
    run_dir = story.write(tmp_path)
    log = RunPaths(run_dir).train_log(1, 1)
    log.write_text("not json\n[]\n" + log.read_text() + '{"step": 99, "un')
    ledger = next(RunPaths(run_dir).ledger.iterdir())
    ledger.write_text("{broken\n" + ledger.read_text())
    RunPaths(run_dir).launch_facts.write_text("[]")
    (RunPaths(run_dir).checkpoint(story.checkpoints[0]) / "manifest.json").unlink()
    view = run_view(run_dir, now=story.now)
    assert view.state is RunState.DONE
    assert view.progress.step == 60
    assert any("2 lines" in problem for problem in view.problems)
    assert any("launch_facts" in problem for problem in view.problems)
    broken = next(c for c in view.checkpoints if c.name == story.checkpoints[0])
    assert not broken.counts
    assert "manifest" in (broken.why_not or "")


def test_a_ledger_file_that_cannot_be_read_makes_the_state_unknown(tmp_path: Path) -> None:
    """The rest of the ledger would tell of a run that still waits for its first attempt to begin."""
    story = rough()
    run_dir = story.write(tmp_path)
    file = next(RunPaths(run_dir).ledger.iterdir())
    file.with_name("other.jsonl").write_bytes(b"\xff\x00 no text \n")
    view = run_view(run_dir, now=story.now)
    assert view.state is RunState.UNKNOWN
    assert "ledger/other.jsonl: cannot be read" in (view.state_reason or "")
    assert view.problems[0] == "ledger/other.jsonl: cannot be read"
    answers = explanation(view)
    assert "other.jsonl" in answers.what_happened and answers.what_it_cost == "Not known."
    assert f"{run_dir}/ledger" in answers.what_you_can_do


def test_beats_give_ranks_their_pids_and_phases(tmp_path: Path) -> None:
    story = running()
    run_dir = story.write(tmp_path)
    ranks = tuple(RankPlace(rank=r, pid=100 + r, phase="step", step=15, quiet_s=0.25) for r in (0, 1))
    record = NodeRecord(
        seq=1, node="node0", host="h", agent_pid=9, epoch=story.epoch, unix=story.now - 1, running=True, ranks=ranks
    )
    write_record(RunPaths(run_dir).beat(1, "node0"), record)
    (RunPaths(run_dir).beat(1, "node1")).write_bytes(b"torn")
    first, second, spare = run_view(run_dir, now=story.now).nodes
    assert (first.beat_age_s, first.stale) == (pytest.approx(1.0), False)
    assert [(r.rank, r.pid, r.phase) for r in first.ranks] == [(0, 100, "step"), (1, 101, "step")]
    assert second.beat_age_s is None
    assert second.stale is None
    assert [r.pid for r in second.ranks] == [None, None]
    assert spare.role == "spare"
    late = run_view(run_dir, now=story.now + 60)
    assert late.nodes[0].stale is True


def test_unreadable_cycle_records_make_checkpoints_not_count(tmp_path: Path) -> None:
    story = rough()
    run_dir = story.write(tmp_path)
    RunPaths(run_dir).cycle_file(1, 2).write_text("{")
    counting = read_run(run_dir, story.now).counting
    assert counting.undecided == (Epoch(1, 1, 2),)


def test_requests_show_their_answer(tmp_path: Path) -> None:
    story = running()
    story.event("request", {"verb": "save-now", "id": "01A", "by": "ada"})
    story.event("request_done", {"verb": "save-now", "id": "01A", "result": "saved"})
    run_dir = story.write(tmp_path)
    waiting = {"schema_version": 1, "verb": "drain", "by": "bob", "created_unix": story.now}
    RunPaths(run_dir).request("drain", "01ARZ3NDEKTSV4RRFFQ69G5FAV").write_text(json.dumps(waiting))
    requests = run_view(run_dir, now=story.now).requests
    assert [(r.verb, r.by, r.result) for r in requests] == [("save-now", "ada", "saved"), ("drain", "bob", None)]


def test_step_lines_keep_floats_bit_for_bit() -> None:
    loss = 3.0000000000000004
    text = json.dumps({"schema_version": 1, "step": 1, "unix": 1.0, "loss": loss, "epoch": "a0001g01c0001"}) + "\n"
    (line,), bad = parse_step_lines(text, epoch=Epoch(9, 9, 9))
    assert (line.loss, line.epoch, bad) == (loss, Epoch(1, 1, 1), 0)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "true", '"3"', "null", "1" + "0" * 400])
def test_numbers_that_are_none_stay_unknown(number: str) -> None:
    text = f'{{"schema_version": 1, "step": 1, "unix": 1.0, "loss": {number}}}\n'
    (line,), _ = parse_step_lines(text, epoch=Epoch(1, 1, 1))
    assert line.loss is None


def test_lines_without_a_step_or_of_another_version_are_counted() -> None:
    text = '{"unix": 1}\n{"schema_version": 2, "step": 1, "unix": 1}\n\n{"step": -1, "unix": 1}\n'
    assert parse_step_lines(text, epoch=Epoch(1, 1, 1)) == ((), 3)
    assert parse_validation_lines(text, epoch=Epoch(1, 1, 1)) == ((), 3)


lines = st.builds(
    StepLine,
    step=st.integers(1, 6),
    epoch=st.builds(Epoch, st.just(1), st.just(1), st.integers(1, 3)),
    unix=st.floats(0, 100),
)


@settings(max_examples=50, deadline=None)
@given(found=st.lists(lines, max_size=20))
def test_merging_keeps_each_line_once_and_the_last_epoch_wins(found: list[StepLine]) -> None:
    merged = merge_steps(found)
    assert len(merged.kept) + len(merged.recomputed) == len(found)
    for kept in merged.kept:
        assert kept.epoch == max(line.epoch for line in found if line.step == kept.step)
    assert [line.step for line in merged.kept] == sorted({line.step for line in found})


@settings(max_examples=30, deadline=None)
@given(count=st.integers(0, 70))
def test_any_prefix_of_a_ledger_has_a_view(count: int) -> None:
    story = rough()
    view = view_of(story, events=tuple(story.events[:count]))
    assert json.dumps(to_json(view), allow_nan=False)


@pytest.mark.parametrize(
    ("lines", "step"),
    [
        ((), None),
        (('"loss": 1}', '{"step": 7, "unix": 1.0}', '{"step": 8, "unix": 2.0}'), 8),
        (('{"step": 7, "unix": 1.0}', '{"step": 8, "un'), 7),
        (('{"unix": 1.0}', "null", "\x00"), None),
    ],
    ids=["nothing", "cut first line", "torn last line", "no step"],
)
def test_the_last_written_step_is_that_of_the_last_whole_line(lines: tuple[str, ...], step: int | None) -> None:
    assert last_written_step(lines) == step
