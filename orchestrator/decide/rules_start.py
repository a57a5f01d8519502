"""The supervisor's rules before a cycle starts: nodes first, then a checkpoint to start from, then the start itself."""

from orchestrator.decide.context import CycleContext, decided
from orchestrator.decide.decision import Action, Decision
from orchestrator.decide.observation import CopyState, Stage
from orchestrator.decide.placement import awaited_nodes, choose_nodes, usable_nodes
from orchestrator.decide.taxonomy import Level
from orchestrator.words import plural


def waiting_for_agents(c: CycleContext) -> Decision | None:
    if c.seen.stage is not Stage.IDLE:
        return None
    usable, awaited = usable_nodes(c.seen, c.health), awaited_nodes(c.seen, c.health, c.policy)
    if choose_nodes(c.seen, c.health) is not None and not awaited:
        return None
    lacking = f"{len(usable)} of {c.seen.num_nodes} nodes are ready"
    if awaited:
        lacking = f"{lacking}, {', '.join(awaited)} may still come and no spare takes that place yet"
    if (awaited or c.seen.stage_s <= c.policy.start_limit_s) and len(_possible(c)) >= c.seen.num_nodes:
        return decided(Action.WAIT, lacking, recheck_after_s=min(0.2, c.policy.beat_interval_s))
    defects = "; ".join(f"{node.name}: {node.defect}" for node in c.seen.nodes if node.defect)
    reason = f"{lacking} after {c.seen.stage_s:.0f} s{'; ' + defects if defects else ''}"
    unusable = tuple(node.name for node in c.seen.nodes if node.name not in usable)
    return decided(Action.END, reason, level=Level.L4, outcome="continue", exclude=unusable)


def _possible(c: CycleContext) -> tuple[str, ...]:
    """Nodes that are neither excluded nor lost for certain: with fewer than a cycle needs, nothing is worth waiting."""
    return tuple(node.name for node in c.seen.nodes if node.name not in c.seen.excluded and node.lost is None)


def fetch_copy(c: CycleContext) -> Decision | None:
    """Copies are asked once, when nothing here can be resumed from; while one is fetched nobody trains."""
    if not _is_at_the_start(c) or c.resume_from is not None:
        return None
    if c.seen.copies is CopyState.FETCHING:
        return decided(Action.WAIT, "a copy of a checkpoint is being fetched", recheck_after_s=c.policy.beat_interval_s)
    if c.seen.copies is not CopyState.UNASKED:
        return None
    return decided(Action.FETCH, "no checkpoint here counts, and copies of some were made: the newest is fetched")


def checkpoints_gone(c: CycleContext) -> Decision | None:
    """A run that had checkpoints does not begin again at step 1 without a person's word."""
    if not _is_at_the_start(c) or c.resume_from is not None:
        return None
    if c.history.best_step == 0 or c.history.may_start_over:
        return None
    return decided(
        Action.HOLD,
        f"the run had a checkpoint of step {c.history.best_step}, and none that counts is left; starting from the "
        "first step is a person's decision",
        level=Level.L5,
        outcome="held",
        hint="Bring one back (`pawl ckpt pull RUN`; `pawl ckpt ls RUN` says why what is there does not count), or "
        "begin again with `pawl resume RUN --from-start`.",
    )


def start(c: CycleContext) -> Decision | None:
    nodes = choose_nodes(c.seen, c.health)
    if c.seen.stage is not Stage.IDLE or nodes is None:
        return None
    where = f"from {c.resume_from}" if c.resume_from else "from the beginning"
    return decided(Action.START, f"{plural(len(nodes), 'node')} ready, {where}", nodes=nodes, resume_from=c.resume_from)


def _is_at_the_start(c: CycleContext) -> bool:
    """The next thing to do would be to start a cycle."""
    return c.seen.stage is Stage.IDLE and choose_nodes(c.seen, c.health) is not None
