"""What a cycle starts from: a checkpoint here, else a copy, else a person's word; the beginning only if it is one."""

from dataclasses import replace

import orch_worlds as w
import pytest

from orchestrator.decide.decide import decide_cycle
from orchestrator.decide.decision import Action, Decision
from orchestrator.decide.observation import CopyState, CycleObservation, Stage
from orchestrator.decide.policy import Policy
from orchestrator.state.epochs import Epoch
from orchestrator.state.history import History, replay
from orchestrator.state.records import Event, OutcomeKind

HAD_FIVE = History(ever_stepped=True, best_step=5)


def idle(*, copies: CopyState = CopyState.NONE, counting: tuple[int, ...] = ()) -> CycleObservation:
    return w.cycle(w.node(0), w.node(1), stage=Stage.IDLE, copies=copies, counting=w.counting(*counting))


def decide(seen: CycleObservation, history: History = HAD_FIVE) -> Decision:
    return decide_cycle(seen, history, Policy(beat_interval_s=1.0))


@pytest.mark.parametrize("copies", CopyState)
def test_a_checkpoint_here_is_nearest(copies: CopyState) -> None:
    decision = decide(idle(copies=copies, counting=(5,)))
    assert (decision.rule, decision.resume_from) == ("start-cycle", w.name(5))


def test_without_one_a_copy_is_fetched_once_and_nobody_trains_meanwhile() -> None:
    assert (decide(idle(copies=CopyState.UNASKED)).action) is Action.FETCH
    waiting = decide(idle(copies=CopyState.FETCHING))
    assert (waiting.rule, waiting.action) == ("fetch-copy", Action.WAIT)


@pytest.mark.parametrize("copies", [CopyState.NONE, CopyState.ASKED])
def test_a_run_whose_checkpoints_are_gone_does_not_begin_again_by_itself(copies: CopyState) -> None:
    decision = decide(idle(copies=copies))
    assert (decision.rule, decision.action, decision.outcome) == ("checkpoints-gone", Action.HOLD, "held")
    assert "step 5" in decision.reason and "--from-start" in decision.hint


def test_with_a_persons_word_it_begins_again() -> None:
    decision = decide(idle(), replace(HAD_FIVE, may_start_over=True))
    assert (decision.action, decision.resume_from) == (Action.START, None)


@pytest.mark.parametrize("copies", [CopyState.NONE, CopyState.ASKED])
def test_a_run_that_never_had_one_starts_at_the_beginning(copies: CopyState) -> None:
    assert decide(idle(copies=copies), History(ever_stepped=True)).action is Action.START


def test_a_bad_last_checkpoint_is_set_aside_where_there_are_copies() -> None:
    bad = w.outcome(0, OutcomeKind.CHECKPOINT_INVALID, exit_code=89, bad_file="x", message="x: wrong digest")
    seen = w.cycle(outcomes=(bad,), counting=w.counting(10), resume_from=w.name(10))
    assert decide(seen).rule == "no-valid-checkpoint"
    with_copies = decide(replace(seen, copies=CopyState.UNASKED))
    assert (with_copies.rule, with_copies.quarantine) == ("checkpoint-invalid", w.name(10))


def test_the_word_holds_until_the_next_checkpoint() -> None:
    def event(seq: int, kind: str, **data: object) -> Event:
        return Event(epoch=Epoch(1, 1, 1), seq=seq, writer="w", unix=float(seq), kind=kind, data=data)

    past = [event(1, "checkpoint_committed", name="x", step=5, bytes=1), event(2, "run_held", rule="checkpoints-gone")]
    assert not replay([*past, event(3, "resumed", by="me")]).may_start_over
    spoken = [*past, event(3, "resumed", by="me", from_start=True)]
    assert replay(spoken).may_start_over
    assert not replay([*spoken, event(4, "checkpoint_committed", name="y", step=2, bytes=1)]).may_start_over
