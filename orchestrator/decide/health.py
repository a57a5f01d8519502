"""Health of ranks and nodes, with evidence: a pure function of one look and the policy.

    rank   ok · starting · waiting (for a rank in a legal long phase) · stuck · stopped · gone · unknown
    node   ok · starting · silent · lost · suppressed · unknown

A node is judged by silence on the clock of whoever listens; a rank by how long its phase and step have not moved, on
the clock of its own host. Beats of another epoch are not this launch's and are ignored. Three things are never taken
for death: a loop that was late itself, many nodes silent at once (storage, network, or we), and a legal long phase.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from orchestrator.decide.observation import CycleObservation, NodeObservation, RankObservation
from orchestrator.decide.policy import Policy
from orchestrator.state.epochs import Epoch

_DEAD_STATES = ("gone", "Z", "X")


class RankState(StrEnum):
    """How a rank is."""

    OK = "ok"
    STARTING = "starting"
    WAITING = "waiting"
    STUCK = "stuck"
    STOPPED = "stopped"
    GONE = "gone"
    UNKNOWN = "unknown"


class NodeState(StrEnum):
    """How a node is."""

    OK = "ok"
    STARTING = "starting"
    SILENT = "silent"
    LOST = "lost"
    SUPPRESSED = "suppressed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHealth:
    """A rank's state and why. `limit_s` is the limit that was applied to its phase, None when none was."""

    rank: int
    node: str
    state: RankState
    why: str
    phase: str | None = None
    step: int | None = None
    age_s: float | None = None
    limit_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHealth:
    """A node's state and why."""

    name: str
    state: NodeState
    why: str
    silence_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """All ranks and nodes. `suspects`: the ranks that explain why nothing moves; empty when all wait for each other.

    `correlated_s`: for how long many nodes have been silent together, None when they are not.
    """

    ranks: tuple[RankHealth, ...]
    nodes: tuple[NodeHealth, ...]
    suspects: tuple[RankHealth, ...] = ()
    correlated_s: float | None = None

    @property
    def stuck(self) -> tuple[RankHealth, ...]:
        return tuple(rank for rank in self.ranks if rank.state is RankState.STUCK)

    @property
    def dead_nodes(self) -> tuple[NodeHealth, ...]:
        return tuple(node for node in self.nodes if node.state in (NodeState.SILENT, NodeState.LOST))


def judge_rank(
    rank: RankObservation, *, epoch: Epoch, running_s: float, policy: Policy, p99_s: Mapping[str, float]
) -> RankHealth:
    """One rank on its own; agents use this too. `running_s`: seconds since this epoch's ranks were started."""
    current = rank.epoch == epoch
    phase = rank.phase if current else None
    known = {"rank": rank.rank, "node": rank.node}
    seen = {"phase": phase, "step": rank.step if current else None}
    if rank.process in _DEAD_STATES:
        return RankHealth(**known, **seen, state=RankState.GONE, why="its process is gone")  # type: ignore[arg-type]
    if rank.process == "T":
        return RankHealth(**known, **seen, state=RankState.STOPPED, why="its process is stopped (T)")  # type: ignore[arg-type]
    if phase is None:
        limit = policy.limit_s("init", p99_s.get("init"))
        state = RankState.STUCK if running_s > limit else RankState.STARTING
        why = f"no beat of this launch for {running_s:.1f} s (limit {limit:.1f} s)"
        return RankHealth(rank=rank.rank, node=rank.node, state=state, why=why, age_s=running_s, limit_s=limit)
    return _judge_phase(rank, phase, policy, p99_s)


def _judge_phase(rank: RankObservation, phase: str, policy: Policy, p99_s: Mapping[str, float]) -> RankHealth:
    limit = policy.limit_s(phase, p99_s.get(phase))
    age = rank.phase_age_s
    if age is None:
        state, why = RankState.UNKNOWN, f"the age of its phase {phase} is not known"
    elif age > limit:
        state, why = RankState.STUCK, f"no movement in {phase} for {age:.1f} s (limit {limit:.1f} s)"
    else:
        state, why = RankState.OK, f"in {phase} for {age:.1f} s"
    return RankHealth(
        rank=rank.rank, node=rank.node, state=state, why=why, phase=phase, step=rank.step, age_s=age, limit_s=limit
    )


def judge_node(node: NodeObservation, *, stage_s: float, late: bool, policy: Policy) -> NodeHealth:
    """One node by its silence. A connection that closed needs one interval less than one that only fell quiet."""
    silence = node.silence_s
    limit = policy.silence_limit_s
    if not node.connected:
        limit = policy.beat_interval_s * max(1, policy.silence_intervals - 1)
    if node.lost is not None:
        state, why = NodeState.LOST, node.lost
    elif silence is None:
        state = NodeState.SILENT if stage_s > policy.start_limit_s else NodeState.STARTING
        why = f"never heard of in {stage_s:.1f} s"
    elif silence <= limit:
        state, why = NodeState.OK, f"heard {silence:.1f} s ago"
    else:
        state = NodeState.SILENT
        why = f"silent for {silence:.1f} s (limit {limit:.1f} s{'' if node.connected else ', connection closed'})"
    if late and state is NodeState.SILENT:
        state, why = NodeState.UNKNOWN, f"{why}; not judged, this loop was late itself"
    return NodeHealth(name=node.name, state=state, why=why, silence_s=silence)


def assess(seen: CycleObservation, policy: Policy) -> Health:
    """Judge every rank of the running cycle and every node of the allocation."""
    late = seen.loop_late_s > policy.late_intervals * policy.beat_interval_s
    nodes, correlated_s = _suppress(
        tuple(judge_node(node, stage_s=seen.stage_s, late=late, policy=policy) for node in seen.nodes), policy
    )
    judged = tuple(
        judge_rank(rank, epoch=seen.epoch, running_s=seen.stage_s, policy=policy, p99_s=seen.p99_s)
        for rank in seen.ranks
    )
    unheard = {node.name for node in nodes if node.state is not NodeState.OK}
    ranks = _excuse(tuple(_doubt(rank) if late or rank.node in unheard else rank for rank in judged))
    return Health(ranks=ranks, nodes=nodes, suspects=_suspects(ranks, seen), correlated_s=correlated_s)


def _doubt(rank: RankHealth) -> RankHealth:
    """What an unheard node last said of its ranks is old: its ages prove nothing about now."""
    if rank.state not in (RankState.STUCK, RankState.OK):
        return rank
    return replace(rank, state=RankState.UNKNOWN, why="not judged: its node was not heard")


def _excuse(ranks: tuple[RankHealth, ...]) -> tuple[RankHealth, ...]:
    """A rank that waits in a step for one that is within a limit of its own is no hang: nobody steps alone.

    That other one may be in a long legal phase (save, eval, compile …), or have just left it for the next step: what
    its node said is newer, by up to a beat, than what the waiting rank's node said.
    """
    busy = next((r for r in ranks if r.state is RankState.OK and r.phase != "exit"), None)
    starting = next((r for r in ranks if r.state is RankState.STARTING), None)
    reason = busy or starting
    if reason is None:
        return ranks
    why = f"waits for rank {reason.rank}, which is {reason.why}"
    return tuple(
        replace(rank, state=RankState.WAITING, why=why)
        if rank.state is RankState.STUCK and rank.phase == "step"
        else rank
        for rank in ranks
    )


def _suppress(nodes: tuple[NodeHealth, ...], policy: Policy) -> tuple[tuple[NodeHealth, ...], float | None]:
    # A node that was never heard of did not fall silent: it never came, and waiting for it has a limit of its own.
    silent = [node for node in nodes if node.state is NodeState.SILENT and node.silence_s is not None]
    many = len(silent) >= policy.correlated_nodes and len(silent) > policy.correlated_share * len(nodes)
    if not many:
        return nodes, None
    why = f"{len(silent)} of {len(nodes)} nodes fell silent together"
    softened = tuple(
        replace(node, state=NodeState.SUPPRESSED, why=f"{node.why}; {why}") if node in silent else node
        for node in nodes
    )
    return softened, min(node.silence_s or 0.0 for node in silent)


def _suspects(ranks: tuple[RankHealth, ...], seen: CycleObservation) -> tuple[RankHealth, ...]:
    """Who explains the standstill: stopped or gone, else stuck outside the step, else behind the others."""
    held = tuple(rank for rank in ranks if rank.state in (RankState.STOPPED, RankState.GONE))
    stuck = tuple(rank for rank in ranks if rank.state is RankState.STUCK)
    if held or not stuck:
        return held
    elsewhere = tuple(rank for rank in stuck if rank.phase != "step")
    if elsewhere and len(elsewhere) < len(ranks):
        return elsewhere
    for measure in (_steps(ranks), _collectives(seen)):
        lowest = min(measure.values(), default=0)
        behind = tuple(rank for rank in stuck if measure.get(rank.rank) == lowest)
        if behind and max(measure.values()) > lowest:
            return behind
    return ()


def _steps(ranks: tuple[RankHealth, ...]) -> dict[int, int]:
    return {rank.rank: rank.step for rank in ranks if rank.step is not None}


def _collectives(seen: CycleObservation) -> dict[int, int]:
    current = (rank for rank in seen.ranks if rank.epoch == seen.epoch)
    return {rank.rank: rank.collective_seq for rank in current if rank.collective_seq is not None}
