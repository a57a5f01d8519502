"""What must hold for every look at every world: total, no kill on unknown, no launch beside a live attempt, bounded."""

import random
from dataclasses import replace
from pathlib import Path

import orch_worlds as w
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.decide.decide import decide_cycle, decide_run, decision_table
from orchestrator.decide.decision import Action, Decision
from orchestrator.decide.health import NodeState, RankState, assess
from orchestrator.decide.observation import AttemptObservation, CycleObservation, Liveness, RunObservation, Stage
from orchestrator.decide.policy import Policy
from orchestrator.decide.rules_cycle import CYCLE_RULES
from orchestrator.decide.rules_run import RUN_RULES
from orchestrator.decide.taxonomy import TABLE, FailureClass
from orchestrator.state.epochs import Epoch
from orchestrator.state.history import History, RunState, replay
from orchestrator.state.records import Event, OutcomeKind

_SUPERVISOR = {
    Action.WAIT,
    Action.NOTE,
    Action.START,
    Action.RESTART,
    Action.DRAIN,
    Action.SAVE,
    Action.PROFILE,
    Action.FETCH,
    Action.FINISH,
    Action.END,
    Action.HOLD,
    Action.FAIL,
    Action.CANCEL,
}
_KILLS = {Action.RESTART, Action.END, Action.HOLD, Action.FAIL}
_CONTROLLER = {Action.WAIT, Action.LAUNCH, Action.ABANDON, Action.END, Action.FINISH, Action.HOLD, Action.FAIL}
quick = settings(max_examples=50, deadline=None)


def test_the_decision_table_is_the_reviewed_one() -> None:
    golden = Path(__file__).parents[1] / "golden" / "decisions.txt"
    assert decision_table() == golden.read_text()


def test_rule_names_are_unique_in_a_scope_and_fit_a_file_name() -> None:
    for rules in (CYCLE_RULES, RUN_RULES):
        names = [rule.name for rule in rules]
        assert len(set(names)) == len(names)
        assert all(name.replace("-", "").isalnum() and name == name.lower() for name in names)


def test_every_class_has_a_row_in_the_failure_table() -> None:
    assert set(TABLE) == set(FailureClass)


@quick
@given(w.cycles_seen, w.histories)
def test_every_look_of_a_supervisor_gives_a_whole_decision(seen: CycleObservation, history: History) -> None:
    decision = decide_cycle(seen, history, Policy())
    assert decision.action in _SUPERVISOR
    assert decision.rule and decision.reason and decision.recheck_after_s >= 0
    if decision.action in (Action.START, Action.RESTART):
        assert decision.nodes and len(set(decision.nodes)) == len(decision.nodes)
        assert not set(decision.nodes) & (set(decision.fault.must_leave) if decision.fault else set())
    if decision.action in (Action.END, Action.FINISH, Action.HOLD, Action.FAIL, Action.CANCEL):
        assert decision.outcome in ("done", "drained", "held", "failed", "cancelled", "continue")


@quick
@given(w.cycles_seen, w.histories)
def test_a_look_decides_the_same_when_it_is_looked_at_again(seen: CycleObservation, history: History) -> None:
    assert decide_cycle(seen, history, Policy()) == decide_cycle(seen, history, Policy())


@quick
@given(st.integers(1, 6), st.floats(0, 1e5), st.sampled_from(["R", "S", "D", None]))
def test_unknown_never_kills(count: int, silence: float, process: str | None) -> None:
    """Ages that are not known, nodes that the late loop cannot judge: nothing of it is a reason to stop anything."""
    nodes = tuple(
        w.node(i, silence_s=silence, ranks=(w.rank(i, f"node{i}", phase_age_s=None, process=process),))
        for i in range(count)
    )
    seen = w.cycle(*nodes, num_nodes=count, loop_late_s=60.0)
    assert decide_cycle(seen, History(), Policy(beat_interval_s=1.0)).action is Action.WAIT


@quick
@given(w.cycles_seen, w.histories)
def test_a_running_cycle_is_only_stopped_for_a_cause(seen: CycleObservation, history: History) -> None:
    seen = replace(seen, stage=Stage.RUNNING, requests=(), notice=None)
    decision = decide_cycle(seen, history, Policy())
    if decision.action not in _KILLS or decision.rule == "correlated-silence-over":
        return
    health = assess(seen, Policy())
    sick = any(node.state in (NodeState.SILENT, NodeState.LOST) for node in health.nodes) or any(
        rank.state in (RankState.STUCK, RankState.STOPPED, RankState.GONE) for rank in health.ranks
    )
    said = any(o.kind is not OutcomeKind.DONE for o in seen.outcomes if o.epoch == seen.epoch)
    ended = any(node.torchrun_exit is not None or node.verdicts for node in seen.training)
    assert sick or said or ended


@quick
@given(w.cycles_seen, w.histories)
def test_no_level_is_taken_after_the_ceiling(seen: CycleObservation, history: History) -> None:
    history = replace(history, cycles_without_progress=5)
    decision = decide_cycle(seen, history, Policy())
    assert decision.action is not Action.RESTART


@quick
@given(w.runs_seen, w.histories)
def test_every_look_of_a_controller_gives_a_decision(seen: RunObservation, history: History) -> None:
    decision = decide_run(seen, history, Policy())
    assert decision.action in _CONTROLLER and decision.rule and decision.reason
    assert decision == decide_run(seen, history, Policy())


@quick
@given(w.runs_seen, w.histories)
def test_nothing_is_launched_while_a_job_may_be_active(seen: RunObservation, history: History) -> None:
    decision = decide_run(seen, history, Policy())
    if decision.action is Action.LAUNCH:
        assert seen.last is None or seen.last.liveness is Liveness.DEAD
        assert decision.attempt == (0 if seen.last is None else seen.last.attempt) + 1
        assert not seen.problems and history.state not in (RunState.HELD, RunState.FAILED, RunState.COMPLETED)
    if seen.last is not None and seen.last.liveness in (Liveness.UNKNOWN, Liveness.ALIVE):
        assert decision.action is Action.WAIT


@quick
@given(w.runs_seen, w.histories)
def test_after_a_launch_the_next_decision_is_to_wait(seen: RunObservation, history: History) -> None:
    decision = decide_run(seen, history, Policy())
    if decision.action is Action.LAUNCH:
        assert decision.attempt is not None
        begun = AttemptObservation(attempt=decision.attempt, liveness=Liveness.ALIVE, why="it runs")
        assert decide_run(replace(seen, last=begun), history, Policy()).action is Action.WAIT


@quick
@given(st.lists(w.events_seen, max_size=25), st.integers(0, 25))
def test_any_prefix_of_any_ledger_replays_and_decides(events: list[Event], length: int) -> None:
    history = replay(events[:length])
    assert history.streak >= 0 and history.cycles_without_progress >= 0
    decide_cycle(w.cycle(), history, Policy())
    decide_run(RunObservation(now_unix=w.NOW, launcher="local", train_steps=9, last=None), history, Policy())


@quick
@given(st.lists(w.events_seen, max_size=15, unique_by=lambda e: e.order), st.randoms())
def test_the_order_in_which_files_are_read_does_not_matter(events: list[Event], shuffle: random.Random) -> None:
    mixed = list(events)
    shuffle.shuffle(mixed)
    assert replay(mixed) == replay(events)


class _World:
    """A run whose every cycle ends by one of the given faults, driven by the two deciders alone."""

    def __init__(self, faults: list[int], commits: list[bool]) -> None:
        self.tape = w.Tape().add("run_created", run="x", world_size=4)
        self.faults, self.commits = faults, commits
        self.launches = self.cycles = self.step = 0
        self.attempts: list[int] = []
        self.last: AttemptObservation | None = None

    def run(self) -> RunState:
        for _ in range(400):
            history = replay(self.tape.events)
            if history.state in (RunState.HELD, RunState.FAILED, RunState.COMPLETED):
                return history.state
            seen = RunObservation(now_unix=w.NOW + 1e7, launcher="local", train_steps=10**6, last=self.last)
            decision = decide_run(seen, history, Policy())
            if decision.action is Action.LAUNCH:
                assert decision.attempt is not None
                self.attempts.append(decision.attempt)
                self.tape.attempt(decision.attempt)
                self._attempt(decision.attempt)
                self.last = AttemptObservation(attempt=decision.attempt, liveness=Liveness.DEAD, why="over")
            elif decision.action is Action.HOLD:
                self.tape.add("run_held", rule=decision.rule, reason=decision.reason, hint=decision.hint)
        raise AssertionError("the run never came to rest")

    def _attempt(self, number: int) -> None:
        for index in range(1, 50):
            self.tape.cycle(number, index)
            fault = self.faults[self.cycles % len(self.faults)]
            if self.cycles < len(self.commits) and self.commits[self.cycles]:
                self.step += 1
                self.tape.commit(self.step)
            self.cycles += 1
            decision = self._decide(fault)
            assert decision.fault is not None
            self.tape.incident(str(decision.fault.cls), decision.fault.fingerprint, str(decision.level))
            if decision.action is not Action.RESTART:
                self.tape.add("attempt_ended", outcome=decision.outcome, reason=decision.reason, rule=decision.rule)
                return
        raise AssertionError("an attempt restarted for ever")

    def _decide(self, fault: int) -> Decision:
        seen = _FAULTS[fault]
        return decide_cycle(seen, replay(self.tape.events), Policy())


def _faults() -> tuple[CycleObservation, ...]:
    stopped = (w.rank(0, "node0", process="T"), w.rank(1, "node0"))
    return (
        w.cycle(w.node(0, ranks=stopped), w.node(1), w.node(2, spare=True)),
        w.cycle(w.node(0), w.node(1, silence_s=99.0), w.node(2, spare=True)),
        w.cycle(w.node(0), w.node(1, silence_s=99.0)),
        w.cycle(outcomes=(w.raised(0, "ZeroDivisionError", "division by zero"),)),
        w.cycle(outcomes=(w.outcome(1, OutcomeKind.DATA_ERROR, exit_code=88, bad_file="a.bin"),)),
        w.cycle(outcomes=(w.outcome(1, OutcomeKind.NONFINITE, exit_code=86),)),
        w.cycle(outcomes=(w.outcome(0, message=w.ECHO),), stage=Stage.ENDED),
    )


_FAULTS = _faults()


@quick
@given(st.lists(st.integers(0, len(_FAULTS) - 1), min_size=1, max_size=8), st.lists(st.booleans(), max_size=20))
def test_budgets_bound_every_run_and_attempts_only_rise(faults: list[int], commits: list[bool]) -> None:
    world = _World(faults, commits)
    assert world.run() is RunState.HELD
    assert world.attempts == sorted(set(world.attempts))
    # Five idle cycles after the last commit at the latest.
    assert world.cycles <= 5 * (sum(commits) + 1) + len(commits) + 1


def test_the_epoch_order_is_the_order_of_tuples() -> None:
    assert Epoch(1, 2, 1) < Epoch(2, 1, 1) < Epoch(2, 1, 10)
