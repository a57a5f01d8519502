"""Six lines, in order, for a run in any state, with the exact command."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_factory import T0, Story
from run_stories import clean, crash_loop, rough

from orchestrator.state.rundir import RunPaths
from orchestrator.views import status
from orchestrator.views.explain import TITLES, explanation, text, to_json
from orchestrator.views.records import RunState, RunView
from orchestrator.views.run_view import RunInputs, build_view, run_view
from orchestrator.views.watch import news


def view_of(story: Story) -> RunView:
    return build_view(
        RunInputs(now=story.now, run_dir=f"runs/{story.run}", events=tuple(story.events), lines=story.step_lines())
    )


def test_six_lines_in_the_order_of_the_questions() -> None:
    for story in (clean(), rough(), crash_loop(), Story()):
        lines = text(view_of(story)).split("\n")
        assert [line[: len(title)] for line, title in zip(lines, TITLES, strict=True)] == list(TITLES)
        assert all(line[len(title) :].strip() for line, title in zip(lines, TITLES, strict=True))


def test_a_recovered_hang_names_rank_cost_and_evidence() -> None:
    answers = explanation(view_of(rough()))
    assert answers.what_happened.startswith("hang_local: rank 1 on node0, phase step, step 45: rank 1 is stopped")
    assert "(L1) from step-000000040.a0001g01c0002 after 2.0 s" in answers.what_pawl_did
    assert answers.what_it_cost == (
        "12.2 s (detection 6.0 s + teardown 0.75 s + back-off 2.0 s + start 3.0 s + load 0.40 s); 5 steps trained again"
    )
    assert answers.evidence == "runs/rough/attempts/0001/cycles/0002/evidence/rank-00001.stacks"
    assert "pawl export rough --out DIR" in answers.what_you_can_do


def test_a_held_run_names_the_rule_and_the_way_out() -> None:
    answers = explanation(view_of(crash_loop()))
    assert answers.what_pawl_did.endswith("[crash-loop]")
    assert "`pawl resume loop`" in answers.what_you_can_do
    assert answers.state_now.startswith("HELD, step 4")


def test_a_lost_attempt_is_what_happened_until_something_else_does() -> None:
    story = rough()
    story.events = [event for event in story.events if event.kind not in ("run_done", "attempt_ended")]
    lost = "its supervisor (pid 7) and all its processes are gone"
    story.event("attempt_ended", {"attempt": 1, "outcome": "lost", "reason": lost, "rule": "attempt-lost"})
    story.attempt()
    answers = explanation(view_of(story))
    assert answers.what_happened == f"attempt 1 was lost: {lost}"
    assert answers.what_it_cost.startswith("Not measured")
    assert answers.evidence == "runs/rough/attempts/0001/"
    story.cycle()
    story.steps(1)
    fault: dict[str, Any] = {"cls": "unknown", "level": "L1", "node": "node0", "rank": 0, "phase": "step"}
    story.fault(incident="i3", message="rank 0 exited", detection_s=0.1, **fault)
    assert explanation(view_of(story)).what_happened.startswith("unknown: rank 0 on node0")


def test_a_supervisor_that_is_gone_is_not_nothing() -> None:
    story = Story()
    story.create()
    story.attempt()
    story.cycle()
    view = replace(view_of(story), state=RunState.LOST, state_reason="its supervisor is gone")
    assert explanation(view).what_happened == "attempt 1 was lost: its supervisor is gone"


def test_a_run_that_was_never_started() -> None:
    story = Story()
    story.create()
    answers = explanation(view_of(story))
    assert answers.what_happened == "The run was never started."
    assert answers.what_it_cost == "Nothing."
    assert "no step yet" in answers.state_now


@pytest.mark.parametrize("state", list(RunState))
def test_every_state_has_something_to_do(state: RunState) -> None:
    view = replace(view_of(clean()), state=state, run="a b")
    todo = explanation(view).what_you_can_do
    assert todo
    assert "a b" not in todo or "'a b'" in todo


def test_a_next_attempt_is_promised_only_where_something_can_start_it() -> None:
    """After an attempt that ended to be continued only a controller goes on: "starts by itself" would be untrue."""
    view = replace(view_of(clean()), state=RunState.QUEUED)
    ended = replace(view.attempts[-1], outcome="continue")
    assert "pawl controller --once" in explanation(replace(view, attempts=(ended,))).what_you_can_do
    waiting = replace(ended, outcome=None)
    assert "starts by itself" in explanation(replace(view, attempts=(waiting,))).what_you_can_do


def test_messages_of_many_lines_stay_one_line() -> None:
    story = rough()
    view = view_of(story)
    broken = replace(view.incidents[-1], message="first\nsecond\x1b[31m\n\nthird")
    lines = text(replace(view, incidents=(broken,))).split("\n")
    assert len(lines) == 6
    assert "\x1b" not in lines[0]


def test_json_has_the_same_six() -> None:
    assert list(to_json(view_of(rough()))) == [
        *("what_happened", "what_pawl_did", "what_it_cost", "state_now", "what_you_can_do", "evidence")
    ]


def ended(verb: str, *, steps: int = 11, by: str | None = "ada") -> Story:
    """A run that a person drained or cancelled after some steps, parked by a controller."""
    outcome = {"drain": "drained", "cancel": "cancelled"}[verb]
    story = Story()
    story.create()
    story.attempt()
    story.cycle(run_first_step=steps > 0)
    story.steps(max(0, steps - 1))
    story.event("request", {"verb": verb, "id": "01R", "by": by})
    story.wait(1.0)
    if verb == "drain" and steps:
        name = f"step-{story.step:09d}.{story.epoch.text}"
        story.checkpoints.append(name)
        story.event("checkpoint_committed", {"name": name, "step": story.step, "bytes": 1})
    story.event("request_done", {"verb": verb, "id": "01R", "result": outcome})
    story.event("attempt_ended", {"outcome": outcome, "reason": "as asked", "rule": f"{verb}-requested"})
    story.event("decision", {"rule": outcome, "action": "hold", "level": "L5", "reason": f"a person {outcome} it"})
    story.event("run_held", {"rule": outcome, "reason": f"a person {outcome} it", "hint": "from the newest checkpoint"})
    return story


@pytest.mark.parametrize("verb", ["drain", "cancel"])
@pytest.mark.parametrize("steps", [0, 11])
def test_a_run_that_its_user_ended_says_who_and_when_and_never_held(verb: str, steps: int, tmp_path: Path) -> None:
    view = run_view(ended(verb, steps=steps).write(tmp_path), now=T0 + 100)
    answers = explanation(view)
    assert answers.what_happened.startswith(f"ada asked the run to {verb}, 20")
    assert "(request 01R)" in answers.what_happened
    assert answers.what_it_cost == "Nothing."
    everything = "\n".join([text(view), status.render(view, width=200), *(item.text for item in news(view))])
    assert "HELD" not in everything and "L5" not in everything
    if not steps:
        assert "newest checkpoint" not in everything
        assert "starts from the beginning" in answers.what_you_can_do
    else:
        assert f"goes on from {view.checkpoints[0].name}" in answers.what_you_can_do


def test_a_drain_says_whether_it_wrote_a_checkpoint(tmp_path: Path) -> None:
    trained = run_view(ended("drain").write(tmp_path / "a"), now=T0 + 100)
    assert explanation(trained).what_pawl_did.startswith("Wrote step-000000011.a0001g01c0001 and ended attempt 1")
    idle = ended("drain", steps=0).write(tmp_path / "b")
    assert "no checkpoint was written" in explanation(run_view(idle, now=T0 + 100)).what_pawl_did


def test_an_ending_whose_author_is_not_recorded_says_so(tmp_path: Path) -> None:
    view = run_view(ended("cancel", by=None).write(tmp_path), now=T0 + 100)
    assert "whose name is not recorded" in explanation(view).what_happened
    assert "who is not recorded" in explanation(replace(view, requests=())).what_happened


def relaunched(*, trains: bool) -> Story:
    """An incident ends the attempt; another one follows and, if it trains, comes to the end."""
    story = Story()
    story.create()
    story.attempt()
    story.cycle()
    story.steps(14)
    fault: dict[str, Any] = {"cls": "node_down", "level": "L4", "node": "node0", "rank": None, "phase": "step"}
    story.fault(incident="i1", message="gone", detection_s=1.0, **fault)
    story.event("attempt_ended", {"outcome": "continue", "reason": "no node left", "rule": "no-nodes"})
    story.wait(30)
    story.attempt()
    story.cycle(run_first_step=trains)
    if trains:
        story.steps(story.train_steps - story.step)
        story.end()
    return story


def test_a_recovery_in_a_later_attempt_is_measured_by_its_first_step() -> None:
    view = view_of(relaunched(trains=True))
    assert explanation(view).what_it_cost.endswith(
        "from the fault to the first step of a later attempt; 5 steps trained again"
    )
    cost = view.incidents[0].cost
    assert cost is not None and cost.total_s is not None and cost.total_s > 30
    assert view_of(relaunched(trains=False)).incidents[0].cost is None


def test_an_incident_after_the_last_checkpoint_costs_nothing_more() -> None:
    story = relaunched(trains=False)
    story.event("run_done", {"step": 60})
    assert "the last checkpoint was there already" in explanation(view_of(story)).what_it_cost


def test_without_its_ledger_a_run_is_not_known_and_the_folder_is_named(tmp_path: Path) -> None:
    run_dir = clean().write(tmp_path)
    shutil.rmtree(run_dir / "ledger")
    view = run_view(run_dir, now=T0 + 100)
    answers = explanation(view)
    assert view.state is RunState.UNKNOWN
    assert answers.what_happened.startswith("Not known: ledger/: the folder is missing")
    assert answers.what_pawl_did == answers.what_it_cost == "Not known."
    assert f"{run_dir}/ledger" in answers.what_you_can_do


def damaged_then_resumed() -> Story:
    """Drained at step 33; the newest checkpoint is damaged, so the next attempt starts from the one before."""
    story = ended("drain", steps=33)
    bad = story.checkpoints.pop()
    story.event("resumed", {"by": "ada"}, writer="cli")
    story.attempt()
    story.cycle()
    story.steps(2)
    story.checkpoints.append(bad)
    return story


def test_a_resume_that_passed_over_a_damaged_checkpoint_says_which_and_why(tmp_path: Path) -> None:
    story = damaged_then_resumed()
    run_dir = story.write(tmp_path)
    (RunPaths(run_dir).checkpoint("step-000000033.a0001g01c0001") / "manifest.json").unlink()
    view = run_view(run_dir, now=story.now)
    happened = explanation(view).what_happened
    assert happened.startswith(
        "resumed from step-000000030.a0001g01c0001, because step-000000033.a0001g01c0001 does not"
    )
    assert "manifest" in happened
    assert "does not count" not in explanation(run_view(rough().write(tmp_path), now=T0)).what_happened
    later = damaged_then_resumed()
    later.run = "later"
    later.event("attempt_ended", {"outcome": "continue", "reason": "time", "rule": "leave"})
    later.attempt()
    later.checkpoints = later.checkpoints[:-1]
    later.cycle()
    assert "does not count" not in explanation(run_view(later.write(tmp_path), now=later.now)).what_happened


def test_an_incident_of_this_attempt_comes_before_what_was_passed_over(tmp_path: Path) -> None:
    story = damaged_then_resumed()
    fault: dict[str, Any] = {"cls": "unknown", "level": "L1", "node": "node0", "rank": 0, "phase": "step"}
    story.fault(incident="i1", message="rank 0 exited", detection_s=0.1, **fault)
    run_dir = story.write(tmp_path)
    (RunPaths(run_dir).checkpoint("step-000000033.a0001g01c0001") / "manifest.json").unlink()
    happened = explanation(run_view(run_dir, now=story.now)).what_happened
    assert happened.startswith("unknown: rank 0 on node0") and "; resumed from step-000000030" in happened
