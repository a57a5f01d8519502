"""The supervisor's rules: what happens inside an allocation (L1, L2, and when to give it up).

    finished → a person's wish → silence of many → cause not clear yet → stop for good → repair → start → go on

Read top to bottom: the first rule that answers is the decision. Everything a rule may know is in `CycleContext`
(context.py); the rules before a cycle starts are in rules_start.py.
"""

from functools import partial

from orchestrator.decide.context import CycleContext, clause, decided
from orchestrator.decide.decision import Action, Decision
from orchestrator.decide.observation import CopyState, Stage
from orchestrator.decide.placement import choose_nodes, usable_nodes
from orchestrator.decide.rules import Rule
from orchestrator.decide.rules_start import checkpoints_gone, fetch_copy, start, waiting_for_agents
from orchestrator.decide.taxonomy import TABLE, FailureClass, Final, Level
from orchestrator.state.records import OutcomeKind, Verb


def _cancel(c: CycleContext) -> Decision | None:
    if not c.asked(Verb.CANCEL):
        return None
    return decided(Action.CANCEL, "a person asked to stop now", outcome="cancelled", fault=None)


def _finished(c: CycleContext) -> Decision | None:
    seen, newest = c.seen, c.seen.counting.newest
    complete = newest is not None and newest.step >= seen.train_steps
    if complete and (c.fault is not None or seen.stage is not Stage.RUNNING):
        return decided(
            Action.FINISH, f"the checkpoint of step {seen.train_steps}, the last one, counts", outcome="done"
        )
    if c.fault is None and _all_said(c, OutcomeKind.DONE):
        return decided(Action.FINISH, "every rank says that it is done", outcome="done")
    return None


def _all_said(c: CycleContext, kind: OutcomeKind) -> bool:
    """Every rank left this outcome, or everything has ended and nobody left another one."""
    said = {o.rank: o.kind for o in c.seen.outcomes if o.epoch == c.seen.epoch}
    if kind not in said.values():
        return False
    ranks = [rank.rank for rank in c.seen.ranks]
    everyone = bool(ranks) and all(said.get(rank) is kind for rank in ranks)
    return everyone or (c.seen.stage is Stage.ENDED and set(said.values()) <= {kind, OutcomeKind.DONE})


def _drained(c: CycleContext) -> Decision | None:
    if c.fault is not None or not _all_said(c, OutcomeKind.DRAINED):
        return None
    return decided(
        Action.END, "every rank saved a checkpoint and left", outcome=c.parting_outcome, resume_from=c.resume_from
    )


def _leave(c: CycleContext) -> Decision | None:
    if not c.leaving or (c.fault is None and c.seen.stage is Stage.RUNNING):
        return None
    why = "a person asked to drain" if c.asked(Verb.DRAIN) else f"notice: {c.seen.notice}"
    return decided(
        Action.END,
        f"{why}, and nothing runs that could save a newer checkpoint",
        outcome=c.parting_outcome,
        resume_from=c.resume_from,
        fault=c.fault,
    )


def _silence_over(c: CycleContext) -> Decision | None:
    silent_s = c.health.correlated_s
    if silent_s is None or silent_s < c.policy.correlated_limit_s:
        return None
    reason = f"many nodes have been silent together for {silent_s:.0f} s: this allocation is given up"
    return decided(Action.END, reason, level=Level.L4, outcome="continue", resume_from=c.resume_from)


def _silence(c: CycleContext) -> Decision | None:
    if c.health.correlated_s is None:
        return None
    reason = (
        "many nodes fell silent together: storage, network or this process is the likelier cause, nothing is killed"
    )
    return decided(Action.WAIT, reason, recheck_after_s=c.policy.beat_interval_s)


def _unsettled(c: CycleContext) -> Decision | None:
    """Echoes arrive before their cause does: the silence of a dead node needs some beats to be heard."""
    if c.fault is None or not c.fault.cascade_only:
        return None
    doubtful = [
        node.name
        for node in c.seen.training
        if not node.connected or (node.silence_s is not None and node.silence_s > 1.5 * c.policy.beat_interval_s)
    ]
    since = None if c.fault.fault_unix is None else c.seen.now_unix - c.fault.fault_unix
    fresh = since is not None and 0.0 <= since < c.policy.settle_s
    if not fresh and not (doubtful and c.seen.stage is Stage.RUNNING):
        return None
    waiting = f" (not heard: {', '.join(doubtful)})" if doubtful else ""
    return decided(Action.WAIT, f"something failed, its cause is not clear yet{waiting}", recheck_after_s=0.2)


def _stop_for_good(c: CycleContext, *, rule: str) -> Decision | None:
    """Budgets, ladder or class say stop; `rule` is the one this row of the table stands for."""
    if c.fault is None or c.remedy is None or c.remedy.final is None or c.remedy.rule != rule:
        return None
    failed = c.remedy.final is Final.FAILED
    return decided(
        Action.FAIL if failed else Action.HOLD,
        f"{c.remedy.why}. {c.fault.message}" if c.fault.message not in c.remedy.why else c.remedy.why,
        level=Level.L5,
        outcome="failed" if failed else "held",
        resume_from=c.resume_from,
        fault=c.fault,
        hint=TABLE[c.fault.cls].hint,
    )


def _undecided(c: CycleContext) -> Decision | None:
    if not c.seen.counting.undecided or (c.fault is None and c.seen.stage is Stage.RUNNING):
        return None
    epoch = c.seen.counting.undecided[0]
    reason = f"the cycle record of {epoch} cannot be read, so it is unknown which checkpoints still count"
    hint = f"restore attempts/{epoch.attempt:04d}/cycles/{epoch.cycle:04d}/cycle.json from a backup, then resume"
    return decided(Action.HOLD, reason, level=Level.L5, outcome="held", fault=c.fault, hint=hint)


def _no_checkpoint_left(c: CycleContext) -> Decision | None:
    if c.fault is None or c.fault.cls is not FailureClass.CHECKPOINT_INVALID or _one_before(c) is not None:
        return None
    if c.seen.copies is CopyState.UNASKED:
        return None  # set aside like any other; the start looks for a copy then
    return decided(
        Action.HOLD,
        f"{clause(c.fault)}; no older checkpoint is left, and starting from the first step is a person's decision",
        level=Level.L5,
        outcome="held",
        fault=c.fault,
        hint=TABLE[c.fault.cls].hint,
    )


def _one_before(c: CycleContext) -> str | None:
    bad = c.fault.bad_checkpoint if c.fault is not None else None
    good = [checkpoint.name for checkpoint in c.seen.counting.counted if checkpoint.name != bad]
    bad_steps = [checkpoint.step for checkpoint in c.seen.counting.counted if checkpoint.name == bad]
    if not bad_steps:
        return good[0] if good else None
    before = c.seen.counting.before(bad_steps[0])
    return None if before is None else before.name


def _checkpoint_invalid(c: CycleContext) -> Decision | None:
    if c.fault is None or c.fault.cls is not FailureClass.CHECKPOINT_INVALID or c.remedy is None:
        return None
    nodes = choose_nodes(c.seen, c.health, leave=c.fault.must_leave) or _same_places(c)
    if nodes is None:
        return None
    return decided(
        Action.RESTART,
        f"{clause(c.fault)}; it is set aside and the checkpoint before it is used",
        level=Level.L1,
        resume_from=_one_before(c),
        quarantine=c.fault.bad_checkpoint,
        nodes=nodes,
        fault=c.fault,
        backoff_s=c.remedy.backoff_s,
    )


def _same_places(c: CycleContext) -> tuple[str, ...] | None:
    """The nodes of the last cycle, when none of them must leave: a node that cannot be judged just now is not bad."""
    names = tuple(node.name for node in c.seen.training)
    leaving = c.fault is not None and bool(c.fault.must_leave)
    return names if len(names) == c.seen.num_nodes and not leaving else None


def _repair(c: CycleContext, *, level: Level) -> Decision | None:
    """L1 or L2: another cycle in this allocation."""
    if c.fault is None or c.remedy is None or c.remedy.level is not level:
        return None
    leave = c.remedy.exclude if level is Level.L2 else ()
    nodes = choose_nodes(c.seen, c.health, leave=leave) or (_same_places(c) if level is Level.L1 else None)
    if nodes is None or c.fault.cls is FailureClass.CHECKPOINT_INVALID:
        return None
    return decided(
        Action.RESTART,
        f"{clause(c.fault)}; {c.remedy.why}",
        level=level,
        resume_from=c.resume_from,
        nodes=nodes,
        exclude=c.remedy.exclude,
        fault=c.fault,
        backoff_s=c.remedy.backoff_s,
    )


def _new_attempt(c: CycleContext) -> Decision | None:
    if c.fault is None or c.remedy is None:
        return None
    return decided(
        Action.END,
        f"{clause(c.fault)}; {c.remedy.why}",
        level=Level.L4,
        outcome="continue",
        resume_from=c.resume_from,
        quarantine=c.fault.bad_checkpoint,
        exclude=c.remedy.exclude,
        fault=c.fault,
        backoff_s=c.remedy.backoff_s,
    )


def _spare_lost(c: CycleContext) -> Decision | None:
    """Nothing that trains is touched, but people must know that the next node to fail has no replacement."""
    training = {node.name for node in c.seen.training}
    known = training | set(c.seen.excluded)
    lost = [node for node in c.health.dead_nodes if node.name not in known]
    if not lost or c.seen.stage is Stage.IDLE:
        return None
    left = sum(name not in training for name in usable_nodes(c.seen, c.health))
    what = "; ".join(f"hot spare {node.name} lost: {node.why}" for node in lost)
    reason = f"{what}; {left} {'spare' if left == 1 else 'spares'} left"
    return decided(Action.NOTE, reason, exclude=tuple(node.name for node in lost))


def _drain(c: CycleContext) -> Decision | None:
    if not c.leaving:
        return None
    why = "a person asked to drain" if c.asked(Verb.DRAIN) else f"notice: {c.seen.notice}"
    if c.seen.drain_sent:
        return decided(Action.WAIT, f"{why}; waiting for the checkpoint at the step border")
    return decided(Action.DRAIN, f"{why}: checkpoint at the next step border, then leave")


def _save(c: CycleContext) -> Decision | None:
    if not c.asked(Verb.SAVE_NOW) or c.seen.save_sent:
        return None
    return decided(Action.SAVE, "a person asked for a checkpoint now")


def _profile(c: CycleContext) -> Decision | None:
    """Once every rank can hear it, and one profile after the other."""
    if not c.asked(Verb.PROFILE) or c.seen.profile_sent or c.seen.stage is not Stage.RUNNING:
        return None
    for node in c.seen.training:
        if not node.connected or not node.ranks or any(rank.phase in (None, "init") for rank in node.ranks):
            return None
    return decided(Action.PROFILE, "a person asked for a profile of the next steps")


def _healthy(c: CycleContext) -> Decision:
    ended = "" if c.seen.stage is Stage.RUNNING else f" ({c.seen.stage})"
    return decided(Action.WAIT, f"nothing is wrong{ended}", recheck_after_s=c.policy.beat_interval_s)


CYCLE_RULES: tuple[Rule[CycleContext], ...] = (
    Rule("cancel-requested", "a person asked to stop now: stop everything, end the attempt", _cancel),
    Rule("finished", "the last step's checkpoint counts, or every rank says done", _finished),
    Rule("drained", "every rank saved and left: end the attempt (parked or continued)", _drained),
    Rule("leave", "asked to leave and nothing can save any more: end the attempt", _leave),
    Rule("correlated-silence-over", "many nodes silent too long: give up the allocation (L4)", _silence_over),
    Rule("correlated-silence", "many nodes silent at once: kill nothing, wait", _silence),
    Rule("cause-not-settled", "only echoes of a failure are known: wait for its cause", _unsettled),
    Rule(
        "not-restartable",
        "config or code error: FAILED; do-not-restart: HELD",
        partial(_stop_for_good, rule="not-restartable"),
    ),
    Rule("crash-loop", "too many cycles without a new checkpoint: HELD", partial(_stop_for_good, rule="crash-loop")),
    Rule(
        "budget-exhausted",
        "this class used up its restarts without progress: HELD",
        partial(_stop_for_good, rule="budget-exhausted"),
    ),
    Rule(
        "ladder-exhausted",
        "no rung is left for this fingerprint: HELD",
        partial(_stop_for_good, rule="ladder-exhausted"),
    ),
    Rule("cycle-record-unreadable", "unknown which checkpoints count: HELD", _undecided),
    Rule("no-valid-checkpoint", "the checkpoint is bad and none is older: HELD", _no_checkpoint_left),
    Rule("checkpoint-invalid", "set the bad checkpoint aside, resume from the one before (L1)", _checkpoint_invalid),
    Rule("swap-node", "the bad node leaves, a hot spare takes its place (L2)", partial(_repair, level=Level.L2)),
    Rule("restart-same-nodes", "a new cycle on the same nodes (L1)", partial(_repair, level=Level.L1)),
    Rule("new-attempt", "not curable in this allocation: end the attempt, a new one follows (L4)", _new_attempt),
    Rule(
        "waiting-for-agents",
        "nodes are missing that may still come: wait; too few after the start limit: give up (L4)",
        waiting_for_agents,
    ),
    Rule("fetch-copy", "no checkpoint is left here, but copies were made: fetch the newest that counts", fetch_copy),
    Rule("checkpoints-gone", "no checkpoint is left of those the run had: HELD", checkpoints_gone),
    Rule("start-cycle", "enough nodes are ready: start the next cycle", start),
    Rule("spare-lost", "a node that does not train is gone: say so, restart nothing", _spare_lost),
    Rule("drain", "asked to leave: checkpoint at the next step border, then exit 75", _drain),
    Rule("save-now", "a person asked for a checkpoint", _save),
    Rule("profile", "a person asked for a profile of some steps", _profile),
    Rule("healthy", "nothing is wrong: look again", _healthy),
)
