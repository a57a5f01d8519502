"""Progress, limits that are learned, and what is never taken for a hang (cases H1 and H3; time is a number here)."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.agent.plan import stopped_grace_s
from orchestrator.agent.shm import Beat, Phase
from orchestrator.agent.stats import told_state
from orchestrator.agent.watch import EXIT_SETTLE_S, GONE, Durations, RankWatch, judge
from orchestrator.decide.observation import VerdictKind
from orchestrator.decide.policy import PhaseLimit, Policy

POLICY = Policy(
    beat_interval_s=1.0,
    phase_limits={
        "init": PhaseLimit(floor_s=5, factor=2, ceiling_s=50),
        "step": PhaseLimit(floor_s=2, factor=3, ceiling_s=30),
        "save": PhaseLimit(floor_s=60, factor=2, ceiling_s=600),
        "exit": PhaseLimit(floor_s=60, factor=2, ceiling_s=600),
    },
)


def beat(phase=Phase.STEP, step=3):
    numbers = {name: 1 for name in Beat.__dataclass_fields__}
    return Beat(**{**numbers, "phase": phase, "step": step, "loss": 1.0})


def watch_of(*seen, durations=None):
    """A watch after these (time, beat or None, state) observations."""
    watch = RankWatch(rank=0, moved_at=0.0)
    for now, found, state in seen:
        watch.observe(now, beat=found, state=state, durations=durations or Durations())
    return watch


def verdict(watch, now, durations=None):
    return judge(watch, now, policy=POLICY, durations=durations or Durations())


def test_before_the_first_beat_the_limit_of_init_holds_from_the_start():
    """H3 (loom#4400)."""
    watch = watch_of((1.0, None, None))
    assert verdict(watch, 49.0) is None
    found = verdict(watch, 51.0)
    assert found.kind is VerdictKind.PHASE_LIMIT and found.phase == "init" and found.step is None


def test_beats_alone_are_no_progress():
    watch = watch_of(*((float(t), beat(), "S") for t in range(1, 40)))
    found = verdict(watch, 40.0)
    assert found.kind is VerdictKind.PHASE_LIMIT and found.quiet_s == pytest.approx(39.0)
    assert found.limit_s == 30.0 and found.ago_s == pytest.approx(39.0)


def test_steps_are_progress_and_teach_the_limit():
    durations = Durations()
    watch = RankWatch(rank=0, moved_at=0.0)
    for step in range(10):
        watch.observe(float(step), beat=beat(step=step), state="S", durations=durations)
    assert durations.p99_s("step") == pytest.approx(1.0)
    assert verdict(watch, 9 + 2.9, durations) is None
    assert verdict(watch, 9 + 3.1, durations).limit_s == pytest.approx(3.0)


def test_a_long_save_is_legal_within_its_own_limit_only():
    """H1."""
    watch = watch_of((0.0, beat(), "S"), (1.0, beat(Phase.SAVE), "S"))
    assert verdict(watch, 500.0) is None
    assert verdict(watch, 602.0).phase == "save"


def test_each_sign_is_said_once():
    watch = watch_of((0.0, beat(), "S"))
    assert verdict(watch, 31.0) is not None
    assert verdict(watch, 32.0) is None


def test_a_stopped_rank_is_told_after_the_grace_and_not_before():
    watch = watch_of((0.0, beat(), "S"), (1.0, beat(), "T"))
    grace = stopped_grace_s(POLICY)
    assert verdict(watch, 1.0 + grace - 0.1) is None and told_state(watch, POLICY, 1.0 + grace - 0.1) == "S"
    assert told_state(watch, POLICY, 1.0 + grace) == "T"
    assert verdict(watch, 1.0 + grace).kind is VerdictKind.STOPPED


def test_a_short_stop_starts_the_grace_anew():
    watch = watch_of((0.0, beat(), "S"), (1.0, beat(), "T"), (2.0, beat(), "S"), (2.5, beat(), "T"))
    assert verdict(watch, 4.0) is None


def test_a_gone_rank_is_told_when_torchrun_had_time_to_explain_it():
    watch = watch_of((0.0, beat(), "S"), (1.0, beat(), GONE))
    assert verdict(watch, 1.0 + EXIT_SETTLE_S / 2) is None and told_state(watch, POLICY, 1.1) is None
    found = verdict(watch, 1.0 + EXIT_SETTLE_S)
    assert found.kind is VerdictKind.EXITED and found.ago_s == pytest.approx(EXIT_SETTLE_S)


def test_a_rank_that_leaves_in_its_exit_phase_is_not_lost():
    watch = watch_of((0.0, beat(), "S"), (1.0, beat(Phase.EXIT), GONE))
    assert verdict(watch, 30.0) is None and told_state(watch, POLICY, 30.0) is None


def test_a_process_that_was_never_seen_is_unknown_not_gone():
    watch = watch_of((0.0, beat(), GONE), (1.0, beat(), GONE))
    assert verdict(watch, 10.0) is None


def test_time_that_the_agent_itself_lost_is_forgiven():
    watch = watch_of((0.0, beat(), "S"))
    watch.forgive(100.0)
    assert verdict(watch, 110.0) is None
    assert verdict(watch, 131.0) is not None


def test_a_restored_step_counter_is_no_completed_step():
    watch = watch_of((0.0, beat(Phase.INIT, 0), "S"), (1.0, beat(Phase.RESTORE, 0), "S"), (2.0, beat(step=50), "S"))
    assert not watch.has_stepped
    watch.observe(3.0, beat=beat(step=51), state="S", durations=Durations())
    assert watch.has_stepped


@settings(max_examples=50, deadline=None)
@given(steps=st.lists(st.floats(0.01, 2.0), min_size=1, max_size=60), pause=st.floats(0.0, 100.0))
def test_a_rank_is_judged_by_its_limit_and_by_nothing_else(steps, pause):
    durations, watch, now = Durations(), RankWatch(rank=0, moved_at=0.0), 0.0
    for number, seconds in enumerate(steps):
        now += seconds
        watch.observe(now, beat=beat(step=number), state="S", durations=durations)
    limit = POLICY.limit_s("step", durations.p99_s("step"))
    assert 2.0 <= limit <= 30.0
    found = verdict(watch, now + pause, durations)
    assert (found is not None) == ((now + pause) - watch.moved_at > limit)


def test_policy_and_watch_know_the_same_phases():
    assert {phase.name.lower() for phase in Phase} == set(Policy().phase_limits)
    assert dataclasses.fields(Beat)[6].name == "phase"
