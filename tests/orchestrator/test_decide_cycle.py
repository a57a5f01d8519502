"""The supervisor's decisions on named worlds: what is done, by which rule, at which level, and what is said."""

from dataclasses import replace

import orch_worlds as w
import pytest

from orchestrator.decide.budgets import backoff_s
from orchestrator.decide.decide import decide_cycle
from orchestrator.decide.decision import Action, Decision, incident_data
from orchestrator.decide.observation import (
    AgentVerdict,
    CycleObservation,
    LogSignature,
    Stage,
    StopNotice,
    VerdictKind,
)
from orchestrator.decide.policy import Policy
from orchestrator.decide.taxonomy import FailureClass, Level
from orchestrator.state.counting import Counting
from orchestrator.state.epochs import Epoch
from orchestrator.state.history import History, replay
from orchestrator.state.records import Outcome, OutcomeKind, Request, Verb

POLICY = Policy(beat_interval_s=1.0)
TRAINED = History(ever_stepped=True, best_step=5)


def decide(seen: CycleObservation, history: History = TRAINED, policy: Policy = POLICY) -> Decision:
    return decide_cycle(seen, history, policy)


def failing(*outcomes: Outcome, **more: object) -> CycleObservation:
    return w.cycle(outcomes=outcomes, counting=w.counting(5), **more)  # type: ignore[arg-type]


def ask(verb: Verb) -> tuple[Request, ...]:
    return (Request(verb=verb, by="me", created_unix=w.NOW, id="01"),)


def test_all_well_waits() -> None:
    assert decide(w.cycle()).rule == "healthy"


def test_the_first_cycle_starts_when_enough_nodes_are_ready() -> None:
    nodes = [w.node(i, spare=True) for i in range(3)]
    decision = decide(w.cycle(*nodes, stage=Stage.IDLE), History())
    assert (decision.action, decision.nodes, decision.resume_from) == (Action.START, ("node0", "node1"), None)
    not_yet = w.cycle(nodes[0], w.node(1, spare=True, ready=None), w.node(2, spare=True, ready=False), stage=Stage.IDLE)
    assert decide(not_yet).rule == "waiting-for-agents"
    given_up = decide(replace(not_yet, stage_s=301.0))
    assert (given_up.action, given_up.outcome, given_up.exclude) == (Action.END, "continue", ("node1", "node2"))


def test_r4_nothing_to_resume_starts_at_the_beginning() -> None:
    """R4 (Lightning#20347)."""
    decision = decide(w.cycle(w.node(0), w.node(1), stage=Stage.IDLE), History())
    assert (decision.rule, decision.action, decision.resume_from) == ("start-cycle", Action.START, None)
    assert decision.nodes == ("node0", "node1") and "from the beginning" in decision.reason


def test_r5_a_run_whose_last_checkpoint_counts_is_finished() -> None:
    """R5 (Megatron-LM#1310)."""
    decision = decide(w.cycle(stage=Stage.IDLE, counting=w.counting(50, 100)))
    assert (decision.rule, decision.action, decision.outcome) == ("finished", Action.FINISH, "done")


def test_a_dead_node_gives_its_place_to_the_spare_and_the_others_keep_theirs() -> None:
    seen = w.cycle(w.node(0, silence_s=9.0), w.node(1), w.node(2, spare=True), counting=w.counting(5))
    decision = decide(seen)
    assert (decision.rule, decision.level, decision.action) == ("swap-node", Level.L2, Action.RESTART)
    assert decision.nodes == ("node2", "node1") and decision.exclude == ("node0",)
    assert decision.resume_from == w.name(5) and "node0" in decision.reason
    assert decision.fault is not None and decision.fault.cls is FailureClass.NODE_DOWN


def test_a_dead_node_without_a_spare_ends_the_attempt() -> None:
    decision = decide(w.cycle(w.node(0), w.node(1, silence_s=9.0), counting=w.counting(5)))
    assert (decision.rule, decision.level, decision.outcome) == ("new-attempt", Level.L4, "continue")
    assert decision.exclude == ("node1",)


def test_a_spare_that_dies_does_not_touch_the_cycle_and_is_said_once() -> None:
    seen = w.cycle(w.node(0), w.node(1), w.node(2, spare=True, silence_s=99.0), w.node(3, spare=True))
    noted = decide(seen)
    assert (noted.rule, noted.action, noted.exclude, noted.fault) == ("spare-lost", Action.NOTE, ("node2",), None)
    assert "node2 lost: silent for 99.0 s" in noted.reason and noted.reason.endswith("1 spare left")
    assert decide(replace(seen, excluded=noted.exclude)).rule == "healthy"
    history = replay(w.Tape().attempt(1).cycle(1, 1).add("decision", **noted.ledger_data()).events)
    assert not history.incidents and history.streak == 0, "it counts against no budget and causes no pause"


@pytest.mark.parametrize("more", [{"drain_sent": True, "requests": ask(Verb.DRAIN)}, {"notice": StopNotice.TIME_LIMIT}])
def test_a_lost_spare_is_said_also_while_the_run_drains(more: dict[str, object]) -> None:
    seen = w.cycle(w.node(0), w.node(1), w.node(2, spare=True, lost="its agent ended by signal 9"), **more)
    assert decide(seen).rule == "spare-lost"
    assert decide(replace(seen, excluded=("node2",))).rule == "drain"


def test_a_node_that_leaves_and_its_spare_that_is_lost_together_are_one_repair_first() -> None:
    seen = w.cycle(w.node(0), w.node(1, silence_s=99.0), w.node(2, spare=True, silence_s=99.0), w.node(3, spare=True))
    assert decide(seen).nodes == ("node0", "node3")


def test_a_crash_restarts_twice_on_the_same_nodes_then_takes_the_node_out_then_stops() -> None:
    seen = failing(w.raised(2, "ZeroDivisionError", "division by zero"))
    first = decide(seen)
    assert (first.rule, first.nodes) == ("restart-same-nodes", ("node0", "node1"))
    assert first.fault is not None and first.fault.node == "node1"
    same = w.incident(FailureClass.RANK_CRASH, fingerprint=first.fault.fingerprint)
    rules = [decide(seen, replace(TRAINED, unresolved=(same,) * n)).rule for n in range(4)]
    assert rules == ["restart-same-nodes", "restart-same-nodes", "swap-node", "budget-exhausted"]


def test_h7_a_killed_rank_is_named_and_its_peers_are_not() -> None:
    """SIGKILL of one rank: its peers fail in their collective and say so; one restart, from the checkpoint.

    Case H7 (pytorch/elastic#134, pytorch#97191).
    """
    killed = AgentVerdict(kind=VerdictKind.EXITED, node="node1", rank=3, exit_code=-9, step=7, fault_unix=w.NOW - 1)
    swept = AgentVerdict(kind=VerdictKind.EXITED, node="node1", rank=2, exit_code=-15, fault_unix=w.NOW - 2)
    seen = w.cycle(
        w.node(0, torchrun_exit=1),
        w.node(1, torchrun_exit=1, verdicts=(swept, killed)),
        outcomes=(w.outcome(0, message=w.ECHO), w.outcome(1, message="Broken pipe")),
        counting=w.counting(5),
    )
    decision = decide(seen)
    assert (decision.rule, decision.resume_from) == ("restart-same-nodes", w.name(5))
    assert decision.fault is not None and (decision.fault.rank, decision.fault.node) == (3, "node1")
    assert incident_data(decision, incident_id="1")["class"] == "rank_crash"


def test_h7_a_stopped_rank_is_named() -> None:
    """H7 (pytorch/elastic#134, pytorch#97191)."""
    stopped = (w.rank(2, "node1"), w.rank(3, "node1", process="T", phase_age_s=4.0))
    decision = decide(w.cycle(w.node(0), w.node(1, ranks=stopped)))
    assert decision.rule == "restart-same-nodes" and decision.fault is not None
    assert (decision.fault.cls, decision.fault.rank) == (FailureClass.HANG_LOCAL, 3)


def test_echoes_of_a_dead_node_wait_for_its_silence() -> None:
    """The survivors' errors arrive seconds before the silence of the node that caused them is long enough."""
    echo = w.outcome(0, message=w.ECHO, written_unix=w.NOW - 2.5)
    early = w.cycle(
        w.node(0, torchrun_exit=1), w.node(1, silence_s=1.9, connected=False), w.node(2, spare=True), outcomes=(echo,)
    )
    assert decide(early).rule == "cause-not-settled"
    late = replace(early, nodes=(early.nodes[0], w.node(1, silence_s=3.5, connected=False), early.nodes[2]))
    decision = decide(late)
    assert (decision.rule, decision.exclude) == ("swap-node", ("node1",))


def test_echoes_alone_are_unknown_after_a_moment() -> None:
    seen = failing(w.outcome(0, message=w.ECHO, written_unix=w.NOW - 0.5), stage=Stage.ENDED)
    assert decide(seen).rule == "cause-not-settled"
    decision = decide(replace(seen, now_unix=w.NOW + 60))
    assert decision.fault is not None and decision.fault.cls is FailureClass.UNKNOWN


def test_outcomes_of_another_launch_are_not_this_ones() -> None:
    assert decide(failing(w.raised(0, "ValueError", "x", epoch=Epoch(1, 1, 9)))).rule == "healthy"


def test_a_config_error_fails_the_run_at_once() -> None:
    decision = decide(failing(w.outcome(0, OutcomeKind.CONFIG_ERROR, exit_code=78, message="model.dim: 7 is odd")))
    assert (decision.rule, decision.action, decision.outcome) == ("not-restartable", Action.FAIL, "failed")
    assert "model.dim: 7 is odd" in decision.reason and "resume" in decision.hint


def test_r22_an_import_error_before_the_first_step_is_code_not_luck() -> None:
    """R22 (metaseq#304, swiss-ai/Megatron-LM#44)."""
    seen = failing(w.raised(0, "ModuleNotFoundError", "No module named 'mymodel'", step=None, phase="init"))
    never = replace(seen, nodes=(w.node(0, ranks=()), w.node(1, ranks=())), counting=Counting())
    decision = decide(never, History())
    assert decision.action is Action.FAIL and "mymodel" in decision.reason
    later = decide(replace(never, resume_from=w.name(5)), TRAINED)
    assert later.fault is not None and later.fault.cls is FailureClass.START_FAIL and later.action is Action.RESTART


def test_r22_an_import_error_that_only_the_log_shows() -> None:
    """R22 (metaseq#304, swiss-ai/Megatron-LM#44)."""
    seen = w.cycle(
        w.node(0, ranks=(), torchrun_exit=1),
        w.node(1, ranks=()),
        signatures=(LogSignature(node="node0", line="ModuleNotFoundError: No module named 'trainer.x'"),),
    )
    assert decide(seen, History()).action is Action.FAIL


def test_r22_data_that_raises_at_step_7_is_retried_once_then_held_with_the_first_error() -> None:
    """R22 (metaseq#304, swiss-ai/Megatron-LM#44)."""
    bad = w.outcome(1, OutcomeKind.DATA_ERROR, exit_code=88, message="shard 3 is cut", bad_file="s3.bin")
    tape = w.Tape().attempt(1).cycle(1, 1).commit(5)
    first = decide(failing(bad), replay(tape.events))
    assert (first.rule, first.backoff_s) == ("restart-same-nodes", 0.0)
    assert first.fault is not None
    tape.add("incident", **incident_data(first, incident_id="1")).cycle(1, 2, w.name(5))
    second = decide(failing(bad), replay(tape.events))
    assert (second.rule, second.action, second.outcome) == ("budget-exhausted", Action.HOLD, "held")
    assert "the first failure was: shard 3 is cut" in second.reason and "repair" in second.hint


def test_r22_a_model_that_does_not_fit_is_held_after_one_retry() -> None:
    """R22 (metaseq#304, swiss-ai/Megatron-LM#44)."""
    big = failing(w.raised(0, "torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 20 GiB", step=0))
    first = decide(big, History())
    assert first.fault is not None and first.fault.cls is FailureClass.CUDA_OOM and first.action is Action.RESTART
    again = History(unresolved=(w.incident(FailureClass.CUDA_OOM, message="CUDA out of memory"),))
    held = decide(big, again)
    assert held.action is Action.HOLD and "micro_batch_size" in held.hint


def test_r22_progress_resets_the_count_and_the_pause_grows_without() -> None:
    """R22 (metaseq#304, swiss-ai/Megatron-LM#44)."""
    tape = w.Tape().attempt(1)
    for number in range(1, 30):
        tape.cycle(1, number).commit(number).incident()
    slow = replay(tape.events)
    assert decide(failing(w.raised(0, "ZeroDivisionError", "x")), slow).action is Action.RESTART
    pauses = [backoff_s(streak, Policy()) for streak in range(7)]
    assert pauses == [0.0, 30.0, 120.0, 480.0, 1800.0, 1800.0, 1800.0]


def test_alternating_symptoms_hit_the_general_ceiling() -> None:
    history = replace(TRAINED, cycles_without_progress=5, unresolved=(w.incident(message="the first of many"),))
    decision = decide(failing(w.raised(0, "ZeroDivisionError", "x")), history)
    assert (decision.rule, decision.action) == ("crash-loop", Action.HOLD)
    assert "the first of many" in decision.reason


def test_a_bad_checkpoint_is_set_aside_and_the_one_before_is_used() -> None:
    """R2 (Lightning#688, metaseq#53)."""
    bad = w.outcome(
        0,
        OutcomeKind.CHECKPOINT_INVALID,
        exit_code=89,
        bad_file="rank-00001.safetensors",
        message="rank-00001.safetensors: wrong digest",
    )
    seen = w.cycle(outcomes=(bad,), counting=w.counting(5, 10), resume_from=w.name(10))
    decision = decide(seen)
    assert (decision.rule, decision.quarantine, decision.resume_from) == ("checkpoint-invalid", w.name(10), w.name(5))
    assert "rank-00001.safetensors" in decision.reason
    last = decide(w.cycle(outcomes=(bad,), counting=w.counting(10), resume_from=w.name(10)))
    assert (last.rule, last.action) == ("no-valid-checkpoint", Action.HOLD)


@pytest.mark.parametrize(
    ("kind", "code", "cls"),
    [
        (OutcomeKind.NONFINITE, 86, FailureClass.NONFINITE),
        (OutcomeKind.SPIKE, 87, FailureClass.LOSS_SPIKE),
        (OutcomeKind.HANG, 90, FailureClass.HANG_COLLECTIVE),
    ],
)
def test_outcomes_that_name_their_class(kind: OutcomeKind, code: int, cls: FailureClass) -> None:
    decision = decide(
        failing(w.outcome(0, kind, exit_code=code), w.outcome(1, message=w.ECHO, written_unix=w.NOW - 50))
    )
    assert decision.fault is not None and decision.fault.cls is cls and decision.action is Action.RESTART


def desync(*suspects: int, **more: object) -> tuple[Outcome, ...]:
    """What all four ranks leave."""
    said = {"exit_code": 91, "message": "Replicas differ after step 7: …", "suspects": suspects, **more}
    return tuple(w.outcome(rank, OutcomeKind.DESYNC, **said) for rank in range(4))


def test_a_rank_that_its_replicas_contradict_costs_its_node_the_place() -> None:
    """Whoever says it first: the node of the suspect leaves, at once, and the newest checkpoint is from before."""
    decision = decide(failing(*desync(3)))
    assert (decision.rule, decision.level, decision.resume_from) == ("swap-node", Level.L2, w.name(5))
    assert (decision.nodes, decision.exclude) == (("node0", "node2"), ("node1",))
    assert decision.fault is not None
    assert (decision.fault.cls, decision.fault.node, decision.fault.rank) == (FailureClass.DESYNC, "node1", 3)
    assert incident_data(decision, incident_id="i")["class"] == "desync"
    alone = decide(w.cycle(w.node(0), w.node(1), outcomes=desync(3), counting=w.counting(5)))
    assert (alone.rule, alone.level, alone.exclude) == ("new-attempt", Level.L4, ("node1",))


def test_replicas_that_differ_without_a_majority_cost_nobody_the_place() -> None:
    """Two copies: nobody knows which is right, so the same nodes try again, then others do."""
    seen, history = failing(*desync()), TRAINED
    rules = []
    for _ in range(3):
        decision = decide(seen, history)
        assert decision.fault is not None and decision.fault.node is None and decision.exclude == ()
        rules.append((decision.rule, str(decision.level)))
        again = w.incident(FailureClass.DESYNC, fingerprint=decision.fault.fingerprint, node=None)
        history = replace(history, unresolved=(*history.unresolved, again))
    assert rules == [("restart-same-nodes", "L1"), ("restart-same-nodes", "L1"), ("new-attempt", "L4")]


def test_exit_91_without_a_word_names_no_node() -> None:
    """Every rank ends so; the one whose outcome is missing is not the one that is wrong."""
    verdict = AgentVerdict(kind=VerdictKind.EXITED, node="node1", rank=2, exit_code=91)
    decision = decide(w.cycle(w.node(0), w.node(1, verdicts=(verdict,)), w.node(2, spare=True), counting=w.counting(5)))
    assert decision.fault is not None
    assert (decision.fault.cls, decision.fault.node, decision.fault.rank) == (FailureClass.DESYNC, None, None)
    assert (decision.rule, decision.exclude) == ("restart-same-nodes", ())


def test_exit_93_is_never_restarted() -> None:
    decision = decide(failing(w.outcome(0, exit_code=93, message="the licence ran out")))
    assert (decision.rule, decision.action) == ("not-restartable", Action.HOLD)
    assert "the licence ran out" in decision.reason


def test_no_space_left_is_storage() -> None:
    decision = decide(failing(w.raised(0, "OSError", "[Errno 28] No space left on device")))
    assert decision.fault is not None and decision.fault.cls is FailureClass.STORAGE


def test_a_drain_is_asked_once_then_waited_for_then_the_attempt_ends() -> None:
    seen = w.cycle(requests=ask(Verb.DRAIN))
    assert decide(seen).action is Action.DRAIN
    assert decide(replace(seen, drain_sent=True)).action is Action.WAIT
    left = tuple(w.outcome(r, OutcomeKind.DRAINED, exit_code=75) for r in range(4))
    done = decide(replace(seen, drain_sent=True, outcomes=left, stage=Stage.ENDED))
    assert (done.rule, done.action, done.outcome) == ("drained", Action.END, "drained")


def test_a_time_limit_continues_in_the_next_attempt() -> None:
    seen = w.cycle(notice=StopNotice.TIME_LIMIT)
    assert decide(seen).action is Action.DRAIN
    left = tuple(w.outcome(r, OutcomeKind.DRAINED, exit_code=75) for r in range(4))
    assert decide(replace(seen, outcomes=left, drain_sent=True)).outcome == "continue"


def test_a_fault_while_leaving_starts_nothing_new() -> None:
    decision = decide(failing(w.raised(0, "ValueError", "x"), requests=ask(Verb.DRAIN), drain_sent=True))
    assert (decision.rule, decision.outcome) == ("leave", "drained")


def test_cancel_comes_before_everything() -> None:
    decision = decide(failing(w.raised(0, "ValueError", "x"), requests=ask(Verb.CANCEL)))
    assert (decision.action, decision.outcome) == (Action.CANCEL, "cancelled")


def test_save_now_is_sent_once() -> None:
    seen = w.cycle(requests=ask(Verb.SAVE_NOW))
    assert decide(seen).action is Action.SAVE
    assert decide(replace(seen, save_sent=True)).action is Action.WAIT


def test_a_profile_is_ordered_once_when_every_rank_can_hear_it_and_puts_nothing_off() -> None:
    seen = w.cycle(requests=ask(Verb.PROFILE))
    assert (decide(seen).action, decide(seen).rule) == (Action.PROFILE, "profile")
    assert decide(replace(seen, profile_sent=True)).action is Action.WAIT
    first, *others = seen.nodes
    starting = replace(first, ranks=tuple(replace(rank, phase="init") for rank in first.ranks))
    for unready in (starting, replace(first, ranks=()), replace(first, connected=False)):
        assert decide(replace(seen, nodes=(unready, *others))).action is not Action.PROFILE, unready
    for more, action in (
        ({"requests": (*ask(Verb.PROFILE), *ask(Verb.DRAIN))}, Action.DRAIN),
        ({"requests": (*ask(Verb.PROFILE), *ask(Verb.SAVE_NOW))}, Action.SAVE),
        ({"notice": StopNotice.TIME_LIMIT}, Action.DRAIN),
    ):
        assert decide(replace(seen, **more)).action is action
        assert decide(replace(seen, profile_sent=True, **more)).action is action


def test_silence_of_many_kills_nothing_for_a_quarter_of_an_hour() -> None:
    nodes = [w.node(i, silence_s=20.0) for i in range(4)]
    assert decide(w.cycle(*nodes, num_nodes=4)).rule == "correlated-silence"
    nodes = [w.node(i, silence_s=901.0) for i in range(4)]
    decision = decide(w.cycle(*nodes, num_nodes=4))
    assert (decision.rule, decision.level, decision.outcome) == ("correlated-silence-over", Level.L4, "continue")


def test_an_unreadable_cycle_record_holds_instead_of_guessing() -> None:
    seen = w.cycle(stage=Stage.IDLE, counting=Counting(undecided=(Epoch(1, 1, 3),)))
    decision = decide(seen)
    assert decision.action is Action.HOLD and "attempts/0001/cycles/0003" in decision.hint


def test_everything_ended_well_without_a_word_is_not_success() -> None:
    seen = w.cycle(w.node(0, torchrun_exit=0), w.node(1, torchrun_exit=0), stage=Stage.ENDED)
    decision = decide(seen)
    assert decision.action is not Action.FINISH and decision.fault is not None


def test_h8_all_ranks_done_finishes_though_a_launcher_hangs() -> None:
    done = tuple(w.outcome(r, OutcomeKind.DONE, exit_code=0, step=100) for r in range(4))
    assert decide(w.cycle(outcomes=done)).rule == "finished"
    assert decide(w.cycle(outcomes=done[:3])).rule == "healthy"


def test_a_message_with_a_full_stop_makes_no_broken_sentence() -> None:
    spoken = w.outcome(1, OutcomeKind.DATA_ERROR, exit_code=88, message="The folder /data is gone. Make it again.")
    decision = decide(failing(spoken))
    assert decision.action is Action.RESTART and "Make it again; " in decision.reason and ".;" not in decision.reason
