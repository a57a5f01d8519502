"""Wall time is accounted for to the microsecond, whatever the ledger says, and settled time never shrinks."""

import math
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_factory import STEP_S, T0, Story
from run_stories import clean, crash_loop, rough

from orchestrator.state.counting import survives
from orchestrator.state.epochs import Epoch
from orchestrator.state.records import Event
from orchestrator.state.train_lines import StepLine, ValidationLine
from orchestrator.views.goodput import account, covered_step, fences
from orchestrator.views.goodput_tape import SETTLED, Account, Category


def account_of(story: Story, now: float | None = None) -> Account:
    return account(story.events, story.step_lines(), story.now if now is None else now)


def test_a_clean_run_is_start_queue_and_work() -> None:
    story = clean()
    result = account_of(story)
    assert result.wall_s == pytest.approx(story.now - T0)
    assert result.seconds(Category.QUEUE) == pytest.approx(3.5)
    assert result.seconds(Category.PREFLIGHT) == pytest.approx(0.25)
    assert result.seconds(Category.START) == pytest.approx(3.0 + 0.75)
    assert result.seconds(Category.SAVE_BLOCKING) == pytest.approx(6 * 0.125)
    assert result.seconds(Category.DATA_STALL) == pytest.approx(60 * 0.0625)
    assert result.seconds(Category.PRODUCTIVE) == pytest.approx(60 * (STEP_S - 0.0625))
    assert result.micros[Category.PROVISIONAL] == result.micros[Category.RECOMPUTE] == result.micros[Category.HANG] == 0


def test_a_rough_run_pays_for_what_was_lost() -> None:
    result = account_of(rough())
    # Steps 21–23 and 41–45 were trained again, and 0.2 s of the step in flight were lost, twice.
    step_work = STEP_S - 0.0625
    assert result.seconds(Category.RECOMPUTE) == pytest.approx((3 + 5) * step_work + 2 * 0.2)
    assert result.seconds(Category.HANG) == pytest.approx(3.5 + 6.0)
    assert result.seconds(Category.BACKOFF) == pytest.approx(2.0)
    assert result.seconds(Category.RECOVERY) == pytest.approx(2 * 0.75)
    assert result.seconds(Category.RESTORE) == pytest.approx(2 * 0.4)
    assert result.seconds(Category.PRODUCTIVE) == pytest.approx(60 * step_work)


@pytest.mark.parametrize("resumed", [False, True])
def test_compiling_is_a_time_of_its_own_before_the_first_step(resumed: bool) -> None:
    """Told by the first line of the cycle; the load that the supervisor saw lasted up to the first step."""
    story = Story()
    story.create()
    story.attempt()
    if resumed:
        story.cycle()
        story.steps(9)
    before = account_of(story)
    story.cycle(run_first_step=False)
    story.wait(3.0 + 0.5 + 1.5)
    story.steps(1)
    story.event("cycle_running", {"step": story.step, "start_s": 3.0, "load_s": 0.5 + 1.5 + STEP_S})
    lines = story.step_lines()
    after = account(story.events, (*lines[:-1], replace(lines[-1], compile_s=1.5)), story.now)
    spent = {category: after.seconds(category) - before.seconds(category) for category in Category}
    assert spent[Category.COMPILE] == pytest.approx(1.5)
    restore = 0.5 if resumed else 0.0
    assert spent[Category.RESTORE] == pytest.approx(restore)
    assert spent[Category.START] == pytest.approx(3.0 + 0.5 - restore)
    assert spent[Category.RENDEZVOUS] == 0


def test_rank_seconds_weigh_time_by_the_ranks_the_attempt_held() -> None:
    result = account_of(clean())
    assert result.rank_micros[Category.QUEUE] == 0
    assert result.rank_micros[Category.PRODUCTIVE] == 6 * result.micros[Category.PRODUCTIVE]


def test_work_is_provisional_until_a_checkpoint_covers_it() -> None:
    story = Story()
    story.create()
    story.attempt()
    story.cycle()
    story.steps(14)
    before = account_of(story)
    assert before.seconds(Category.PRODUCTIVE) == pytest.approx(10 * (STEP_S - 0.0625))
    assert before.seconds(Category.PROVISIONAL) == pytest.approx(5 * (STEP_S - 0.0625))
    story.steps(5)
    after = account_of(story)
    assert after.micros[Category.PROVISIONAL] == 0
    assert after.seconds(Category.PRODUCTIVE) == pytest.approx(20 * (STEP_S - 0.0625))


def test_held_time_counts_until_somebody_resumes() -> None:
    story = crash_loop()
    held = account_of(story, now=story.now + 3600)
    assert held.seconds(Category.HELD) == pytest.approx(3600)
    assert held.micros[Category.PRODUCTIVE] == 0


def ended_by_a_person(verb: str, resumed_after_s: float | None) -> Story:
    """Twelve steps, ended at a person's word, parked by a controller a minute later; perhaps resumed."""
    story = Story()
    story.create()
    story.attempt()
    story.cycle()
    story.steps(11)
    story.wait(0.5)
    story.event("cycle_ended", {"outcome": verb, "exit_code": 75, "step": story.step})
    story.event("attempt_ended", {"outcome": verb, "reason": "as asked", "rule": "leave"})
    story.wait(60)
    story.event("run_held", {"rule": verb, "reason": "a person asked"}, writer="ctl")
    if resumed_after_s is not None:
        story.wait(resumed_after_s - 60)
        story.event("resumed", {"by": "ada"}, writer="cli")
        story.attempt()
        story.cycle()
        story.steps(3)
    return story


@pytest.mark.parametrize("verb", ["drained", "cancelled"])
def test_a_run_that_its_user_ended_does_not_age(verb: str) -> None:
    story = ended_by_a_person(verb, None)
    alive = account_of(story, now=story.now - 60)
    later = account_of(story, now=story.now + 86_400)
    assert later.wall_us == alive.wall_us
    assert later.micros[Category.HELD] == later.micros[Category.DRAINED] == 0


def test_the_time_until_a_drained_run_is_resumed_is_drained() -> None:
    story = ended_by_a_person("drained", 3600)
    result = account_of(story)
    assert result.seconds(Category.DRAINED) == pytest.approx(3600)
    assert result.micros[Category.HELD] == 0
    assert result.wall_s == pytest.approx(story.now - T0)


def test_the_time_until_a_cancelled_run_is_resumed_is_no_time_of_the_run() -> None:
    story = ended_by_a_person("cancelled", 3600)
    result = account_of(story)
    assert result.micros[Category.HELD] == result.micros[Category.DRAINED] == 0
    assert result.wall_s == pytest.approx(story.now - T0 - 3600)
    assert sum(result.micros.values()) == result.wall_us


def test_before_the_first_step_there_is_no_goodput() -> None:
    story = Story()
    story.create()
    story.attempt()
    story.cycle(run_first_step=False)
    story.wait(5.0)
    starting = account_of(story)
    assert starting.seconds(Category.PROVISIONAL) == pytest.approx(5.0)
    assert starting.productive_ratio is None and starting.ettr is None


def test_a_start_in_progress_is_no_work() -> None:
    story = clean()
    story.events = [event for event in story.events if event.kind not in ("run_done", "attempt_ended")]
    before = account_of(story)
    work = (before.productive_ratio or 0.0) * before.wall_s
    story.attempt()
    story.cycle(run_first_step=False)
    story.wait(1000.0)
    after = account_of(story)
    assert (after.productive_ratio or 0.0) * after.wall_s == pytest.approx(work)


def test_a_finished_run_does_not_age() -> None:
    story = clean()
    assert account_of(story, now=story.now + 86_400).wall_us == account_of(story).wall_us


def test_evaluation_after_the_last_step_has_its_own_category() -> None:
    story = clean()
    evaluation = ValidationLine(step=60, epoch=story.epoch, unix=story.now - 0.45, loss=3.0)
    with_eval = account(story.events, story.step_lines(), story.now, evals=[evaluation])
    assert with_eval.seconds(Category.EVAL) == pytest.approx(0.3)
    assert with_eval.wall_us == account_of(story).wall_us


def test_an_empty_ledger_has_no_wall_time() -> None:
    result = account([], [], T0)
    assert result.wall_us == 0
    assert result.productive_ratio is None
    assert result.begin_unix is None


def test_a_quarantined_checkpoint_covers_nothing() -> None:
    story = clean()
    assert covered_step(story.events, fences(story.events)) == 60
    story.event("checkpoint_quarantined", {"name": story.checkpoints[-1], "reason": "digest"})
    assert covered_step(story.events, fences(story.events)) == 50


def test_a_later_cycle_fences_earlier_checkpoints() -> None:
    cycles = fences(rough().events)
    first = Epoch(1, 1, 1)
    assert survives(first, 20, cycles)
    assert not survives(first, 23, cycles)


# --- properties ----------------------------------------------------------------------------------------------------

STARTS = ["run_created", "attempt_intent", "attempt_submitted", "attempt_started", "cycle_started", "resumed"]
TROUBLES = ["incident", "teardown", "decision", "recovered", "checkpoint_committed", "checkpoint_quarantined"]
ENDINGS = ["cycle_running", "cycle_ended", "attempt_ended", "run_done", "run_held", "run_failed", "request", "export"]
KINDS = [*STARTS, *TROUBLES, *ENDINGS]

times = st.one_of(st.floats(min_value=T0 - 50, max_value=T0 + 500), st.just(T0))
durations = st.one_of(st.none(), st.floats(min_value=-5, max_value=90), st.just(math.nan))


@st.composite
def ledgers(draw: st.DrawFn) -> list[Event]:
    """Any sequence of facts, with clocks that step and data that lies."""
    events = []
    for seq in range(draw(st.integers(0, 14))):
        data = {
            "outcome": draw(st.sampled_from(["done", "held", "continue", "lost", "crashed", "drained", "cancelled"])),
            "rule": draw(st.sampled_from(["drained", "cancelled", "crash-loop"])),
            "backoff_s": draw(durations),
            "start_s": draw(durations),
            "load_s": draw(durations),
            "fault_unix": draw(st.one_of(st.none(), times)),
            "detected_unix": draw(st.one_of(st.none(), times)),
            "resume_from": draw(st.sampled_from([None, "step-000000003.a0001g01c0001"])),
            "name": f"step-{draw(st.integers(0, 6)):09d}.a0001g01c0001",
            "nodes": draw(st.sampled_from([2, ["a", "b"], None])),
            "world_size": draw(st.sampled_from([4, None])),
        }
        epoch = Epoch(1, 1, draw(st.integers(0, 3)))
        kind = draw(st.sampled_from(KINDS))
        writer = draw(st.sampled_from("ab"))
        events.append(Event(epoch=epoch, seq=seq, writer=writer, unix=draw(times), kind=kind, data=data))
    return events


step_lines = st.builds(
    StepLine,
    step=st.integers(1, 8),
    epoch=st.builds(Epoch, st.just(1), st.just(1), st.integers(0, 3)),
    unix=times,
    step_time_s=durations,
    data_wait_s=durations,
    save_s=durations,
    compile_s=durations,
)


@settings(max_examples=50, deadline=None)
@given(events=ledgers(), lines=st.lists(step_lines, max_size=10), now=times)
def test_categories_sum_to_wall_time_exactly(events: list[Event], lines: list[StepLine], now: float) -> None:
    result = account(events, lines, now)
    assert sum(result.micros.values()) == result.wall_us
    assert all(value >= 0 for value in result.micros.values())
    assert all(value >= 0 for value in result.rank_micros.values())
    assert 0 <= result.starting_us <= result.micros[Category.PROVISIONAL]


_ENDED = [partial(ended_by_a_person, verb, 3600.0) for verb in ("drained", "cancelled")]


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_settled_time_never_shrinks_while_the_story_is_told(data: st.DataObject) -> None:
    story = data.draw(st.sampled_from([clean, rough, crash_loop, *_ENDED]))()
    moments = sorted(data.draw(st.lists(st.floats(T0, story.now), min_size=2, max_size=6)))
    lines = story.step_lines()
    previous: Account | None = None
    for moment in moments:
        seen = [event for event in story.events if event.unix <= moment]
        result = account(seen, [line for line in lines if line.unix <= moment], moment)
        assert sum(result.micros.values()) == result.wall_us
        if previous is not None:
            assert not [c for c in SETTLED if result.micros[c] < previous.micros[c]]
        previous = result
