"""Six lines, in order, for a run in any state, with the exact command."""

from dataclasses import replace
from typing import Any

import pytest
from run_factory import Story, clean, crash_loop, rough

from orchestrator.views.explain import TITLES, explanation, text, to_json
from orchestrator.views.records import RunState, RunView
from orchestrator.views.run_view import RunInputs, build_view


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
    answers = explanation(build_view(RunInputs(now=1.0, run_dir="runs/new")))
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
