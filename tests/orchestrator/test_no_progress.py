"""The same failure again and again: restarts are few, pauses grow, it ends, and the first error is what is shown.

Case R22 (metaseq#304, swiss-ai/Megatron-LM#44): runs that failed at the same step were requeued for ever. Here whole
runs are played through the supervisor's decisions; what it would write to the ledger is written after each.
"""

from dataclasses import dataclass, field, replace

import orch_worlds as w
import pytest

from orchestrator.decide.decide import decide_cycle, decide_run
from orchestrator.decide.decision import Action, Decision, incident_data
from orchestrator.decide.observation import AttemptObservation, Liveness, LogSignature, RunObservation
from orchestrator.decide.policy import Policy
from orchestrator.state.counting import Counting
from orchestrator.state.history import History, RunState, replay
from orchestrator.state.records import Outcome, OutcomeKind

POLICY = Policy(beat_interval_s=1.0)
CODE_ERRORS = {
    "ImportError": "cannot import name 'Llama' from 'mymodel'",
    "ModuleNotFoundError": "No module named 'mymodel'",
    "SyntaxError": "invalid syntax (mymodel.py, line 3)",
    "AttributeError": "module 'torch' has no attribute 'compyle'",
    "NameError": "name 'x' is not defined",
    "TypeError": "forward() got an unexpected keyword argument 'mask'",
    "ValueError": "hidden size 33 is no multiple of 4 heads",
    "KeyError": "'rope_theta'",
}


@dataclass
class Play:
    """One run. `fail` plays a cycle: it trains from the newest checkpoint, commits, then fails as told."""

    tape: w.Tape = field(default_factory=lambda: w.Tape().attempt(1))
    commits: list[int] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    attempt: int = 1
    number: int = 0

    @property
    def history(self) -> History:
        return replay(self.tape.events)

    @property
    def pauses(self) -> list[float]:
        return [decision.backoff_s for decision in self.decisions if decision.action in (Action.RESTART, Action.END)]

    def fail(self, *outcomes: Outcome, commits: tuple[int, ...] = (), stepped: bool = True, log: str = "") -> Decision:
        resume = w.name(self.commits[-1]) if self.commits else None
        self.number += 1
        self.tape.cycle(self.attempt, self.number, resume)
        if stepped:
            self.tape.add("cycle_running", step=0)
        for step in commits:
            self.tape.commit(step)
            self.commits.append(step)
        seen = w.cycle(outcomes=outcomes, counting=w.counting(*self.commits), resume_from=resume)
        if not stepped:
            ranks = w.node(0, ranks=(), torchrun_exit=1 if log else None), w.node(1, ranks=())
            lines = (LogSignature(node="node0", line=log),) if log else ()
            seen = replace(seen, nodes=ranks, signatures=lines, counting=Counting())
        decision = decide_cycle(seen, self.history, POLICY)
        assert decision.fault is not None, decision
        self.decisions.append(decision)
        self.write(decision)
        return decision

    def write(self, decision: Decision) -> None:
        self.tape.add("incident", **incident_data(decision, incident_id=str(len(self.decisions))))
        words = {"rule": decision.rule, "reason": decision.reason, "hint": decision.hint}
        if decision.action is Action.END:
            self.tape.add("attempt_ended", outcome="continue", reason=decision.reason, rule=decision.rule)
            self.attempt, self.number = self.attempt + 1, 0
            self.tape.attempt(self.attempt)
        elif decision.action is not Action.RESTART:
            self.tape.add("run_failed" if decision.action is Action.FAIL else "run_held", **words)

    def controller(self) -> Decision:
        """What the controller makes of it a day later, when nothing of the attempt lives."""
        over = AttemptObservation(attempt=self.attempt, liveness=Liveness.DEAD, why="gone", age_s=86400.0)
        seen = RunObservation(now_unix=w.NOW + 86400, launcher="local", train_steps=100, last=over)
        return decide_run(seen, self.history, POLICY)


def at_step_7(which: str, again: int) -> Outcome:
    """A data file, or the code that reads it, fails at step 7; what differs from time to time is a number."""
    match which:
        case "damaged-file":
            return w.outcome(
                1, OutcomeKind.DATA_ERROR, exit_code=88, message=f"s3.bin: record {again} is cut", bad_file="s3.bin"
            )
        case "file-gone":
            return w.raised(1, "FileNotFoundError", f"[Errno 2] No such file or directory: 'part-{again}.bin'")
        case "storage":
            return w.raised(1, "OSError", f"[Errno 5] Input/output error: 'part-{again}.bin'")
        case "code":
            return w.raised(1, "ValueError", f"token id {again} is outside of the vocabulary")
        case _:
            kinds = ("RuntimeError", "OSError", "KeyError", "AssertionError")
            return w.raised(again % 4, kinds[again % 4], f"another one: {'abcdefgh'[again]}")


@pytest.mark.parametrize("which", ["damaged-file", "file-gone", "storage", "code", "changing-symptoms"])
@pytest.mark.parametrize("saved", [(), (5,)], ids=["no-checkpoint", "checkpoint-at-5"])
def test_r22_what_raises_at_step_7_every_time_is_held_after_a_few_growing_pauses(
    which: str, saved: tuple[int, ...]
) -> None:
    """R22 (metaseq#304): bounded restarts, a pause that grows, HELD, the first error in the reason."""
    play = Play()
    first = at_step_7(which, 0)
    while play.history.state is not RunState.HELD:
        assert play.number + play.attempt < 12, [decision.rule for decision in play.decisions]
        play.fail(at_step_7(which, len(play.decisions)), commits=saved if not play.decisions else ())
    assert len(play.decisions) <= POLICY.max_cycles_without_checkpoint + 1
    assert play.pauses == [0.0, 30.0, 120.0, 480.0, 1800.0][: len(play.pauses)] and play.pauses
    parked = play.history.parked
    assert parked is not None and play.decisions[-1].action is Action.HOLD
    said = first.exception.message if first.exception else first.message
    assert said in parked.reason and parked.hint
    assert (play.controller().rule, play.controller().action) == ("parked", Action.WAIT)


@pytest.mark.parametrize(("rule", "held"), [("cancelled", False), ("drained", False), ("crash-loop", True)])
def test_only_a_run_that_waits_is_called_held_by_the_controller(rule: str, held: bool) -> None:
    tape = w.Tape().attempt(1).add("run_held", rule=rule, reason="the reason", hint="")
    seen = RunObservation(now_unix=w.NOW, launcher="local", train_steps=9, last=None)
    decision = decide_run(seen, replay(tape.events), POLICY)
    assert decision.rule == "parked" and "the reason" in decision.reason
    assert ("held" in decision.reason) == held


def test_r22_progress_resets_count_and_pause() -> None:
    """R22: a run that fails at ever new steps is slow, not stuck; one new checkpoint empties the budget's count."""
    play = Play()
    for _ in range(3):
        play.fail(at_step_7("code", 1))
    assert play.pauses == [0.0, 30.0, 120.0] and play.history.cycles_without_progress == 3
    for start in range(10, 100, 10):
        decision = play.fail(at_step_7("code", 1), commits=(start, start + 5))
        assert decision.action is Action.RESTART and decision.resume_from == w.name(start + 5)
    assert play.pauses[3:] == [0.0] * 9
    stuck = [play.fail(at_step_7("code", 1)).action for _ in range(3)]
    assert stuck == [Action.RESTART, Action.END, Action.HOLD] and play.pauses[-2:] == [30.0, 120.0]


@pytest.mark.parametrize("type_", CODE_ERRORS)
@pytest.mark.parametrize("where", ["outcome", "log"])
def test_r22_a_code_error_before_step_1_fails_and_is_never_retried(type_: str, where: str) -> None:
    """R22 (swiss-ai/Megatron-LM#44): neither the supervisor nor, later, the controller starts it again."""
    play, message = Play(), CODE_ERRORS[type_]
    spoken = w.raised(0, type_, message, step=None, phase="init")
    if where == "outcome":
        decision = play.fail(spoken, stepped=False)
    else:
        decision = play.fail(stepped=False, log=f"{type_}: {message}")
    assert (decision.rule, decision.action, decision.outcome) == ("not-restartable", Action.FAIL, "failed")
    assert message in decision.reason and "resume" in decision.hint and play.pauses == []
    assert play.history.state is RunState.FAILED
    assert (play.controller().rule, play.controller().action) == ("parked", Action.WAIT)


@pytest.mark.parametrize("saved", [(), (5, 10)], ids=["before-step-1", "after-a-change-of-the-config"])
def test_r22_a_config_error_fails_and_is_never_retried(saved: tuple[int, ...]) -> None:
    """R22: also on a run that has trained before, for a later revision may be wrong."""
    play = Play()
    message = "run.yaml:7: error: parallelism.tp: 5 heads cannot be shared out over tp = 2"
    wrong = w.outcome(0, OutcomeKind.CONFIG_ERROR, exit_code=78, step=None, phase="init", message=message)
    decision = play.fail(wrong, commits=saved)
    assert (decision.action, decision.outcome, play.pauses) == (Action.FAIL, "failed", [])
    assert play.history.state is RunState.FAILED and message in decision.reason
    assert play.controller().action is Action.WAIT


def test_r22_a_config_that_is_too_big_ends_after_one_retry_with_the_key_to_change() -> None:
    """R22: memory that is full at step 0 may be a neighbour's, so it is tried once more, and then held."""
    play = Play()
    for again in range(2):
        message = f"CUDA out of memory. Tried to allocate {20 + again} GiB"
        play.fail(w.raised(0, "torch.OutOfMemoryError", message, step=0, phase="step"))
    assert [decision.action for decision in play.decisions] == [Action.RESTART, Action.HOLD]
    parked = play.history.parked
    assert parked is not None and "Tried to allocate 20 GiB" in parked.reason
    assert "tokens.micro_batch_size" in parked.hint and play.controller().action is Action.WAIT
