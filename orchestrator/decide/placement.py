"""Who trains next: pure functions of one look and its health.

    wanted     the nodes of the last cycle in their places; before the first one the training nodes of the plan, which
               are the first of the allocation that may be used
    awaited    wanted nodes that are not usable yet and may still come: nobody takes their place meanwhile
    chosen     the wanted nodes that are usable, in their places, and hot spares in the places of the others

In which order agents report changes nothing: nodes are taken in the order of the allocation.
"""

from orchestrator.decide.health import Health, NodeState
from orchestrator.decide.observation import CycleObservation, NodeObservation
from orchestrator.decide.policy import Policy


def usable_nodes(seen: CycleObservation, health: Health) -> tuple[str, ...]:
    """Nodes that can train now: heard, passed their preflight, not excluded. Those of the last cycle come first."""
    state = {node.name: node.state for node in health.nodes}
    order = sorted(seen.nodes, key=lambda node: (node.node_rank is None, node.node_rank or 0))
    return tuple(
        node.name
        for node in order
        if state.get(node.name) is NodeState.OK and node.ready and node.connected and node.name not in seen.excluded
    )


def wanted_nodes(seen: CycleObservation) -> tuple[str, ...]:
    """The nodes that should train if all of them can, in node-rank order."""
    before = tuple(node.name for node in seen.training)
    if len(before) == seen.num_nodes:
        return before
    allowed = (node.name for node in seen.nodes if node.name not in seen.excluded)
    return tuple(allowed)[: seen.num_nodes]


def awaited_nodes(seen: CycleObservation, health: Health, policy: Policy) -> tuple[str, ...]:
    """Wanted nodes that may still come; () once they have been waited for as long as a spare waits."""
    if seen.stage_s > policy.spare_wait_s:
        return ()
    usable, state = usable_nodes(seen, health), {node.name: node.state for node in health.nodes}
    wanted = [node for node in seen.nodes if node.name in wanted_nodes(seen) and node.name not in usable]
    return tuple(node.name for node in wanted if _may_come(node, state.get(node.name), seen))


def _may_come(node: NodeObservation, state: NodeState | None, seen: CycleObservation) -> bool:
    bad = node.ready is False or node.name in seen.excluded
    return not bad and state in (NodeState.STARTING, NodeState.OK, NodeState.UNKNOWN)


def choose_nodes(seen: CycleObservation, health: Health, *, leave: tuple[str, ...] = ()) -> tuple[str, ...] | None:
    """Who trains next, in node-rank order: everyone keeps their place, spares take the places of those who leave.

    None when there are not enough nodes. Spares are taken in the order of the allocation.
    """
    usable = [name for name in usable_nodes(seen, health) if name not in leave]
    if len(usable) < seen.num_nodes:
        return None
    wanted = wanted_nodes(seen)
    spares = [name for name in usable if name not in wanted]
    places = [name if name in usable else None for name in wanted]
    return tuple(name if name is not None else spares.pop(0) for name in places)
