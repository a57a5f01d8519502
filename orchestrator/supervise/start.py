"""Beginning and ending a cycle on its nodes.

begin    new number, fresh port, cycle.json on disk, then the word to the agents: a rank that can run has a record
end      Stop to every node, answers until a limit; what cannot answer is cleaned up from here
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from orchestrator.agent.messages import Hello, Start, Stop
from orchestrator.agent.plan import AttemptPlan
from orchestrator.state.codec import dumps
from orchestrator.state.epochs import Epoch
from orchestrator.state.fsio import write_atomic
from orchestrator.state.records import AttemptNode, AttemptNodes, Cycle, CycleNode
from orchestrator.state.rundir import RunPaths, make_cycle
from orchestrator.supervise import ports
from orchestrator.supervise.edge import Edge
from orchestrator.supervise.hub import Hub
from orchestrator.supervise.nodes import Nodes

STOP_LIMIT_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Teardown:
    """How a cycle was ended. `orphans`: processes that are still there, None when a node could not be asked."""

    seconds: float
    orphans: int | None
    evidence: tuple[str, ...]
    unanswered: tuple[str, ...]


def new_epoch(paths: RunPaths, attempt: int, generation: int, *, after: int) -> Epoch:
    """The next free cycle number, with its folders made. Raises OSError."""
    number = after + 1
    while not make_cycle(paths, epoch := Epoch(attempt, generation, number)):
        number += 1
    return epoch


def write_cycle(
    paths: RunPaths,
    plan: AttemptPlan,
    epoch: Epoch,
    *,
    nodes: tuple[tuple[str, str], ...],
    resume_from: str | None,
    used_ports: set[int],
) -> Cycle:
    """Write cycle.json for these (name, address) nodes in node-rank order. Raises NoPort (S9, S12) and OSError."""
    local = plan.launcher == "local"
    master = nodes[0][1]
    ports.check_meeting_address(master, num_nodes=len(nodes), local=local)
    port = ports.free_port(avoid=frozenset(used_ports), seed=f"{plan.nonce}/{epoch.text}")
    used_ports.add(port)
    cycle = Cycle(
        run=plan.run,
        epoch=epoch,
        nonce=plan.nonce,
        resume_from=resume_from,
        nodes=tuple(CycleNode(node_rank=i, name=name, address=at) for i, (name, at) in enumerate(nodes)),
        ranks_per_node=plan.ranks_per_node,
        world_size=plan.world_size,
        master_addr=master,
        master_port=port,
        config=plan.config,
        beat_interval_s=plan.policy.beat_interval_s,
        created_unix=time.time(),
    )
    write_atomic(paths.cycle_file(epoch.attempt, epoch.cycle), dumps(cycle, indent=2) + "\n")
    return cycle


def write_nodes(
    paths: RunPaths,
    attempt: int,
    nodes: tuple[tuple[str, str], ...],
    *,
    training: Collection[str],
    agent_pids: Mapping[str, int],
) -> None:
    """Write nodes.json for these (name, address) nodes: as planned, then as each cycle has it. Raises OSError."""
    found = (
        AttemptNode(name=name, address=at, spare=name not in training, agent_pid=agent_pids.get(name))
        for name, at in nodes
    )
    write_atomic(paths.nodes(attempt), dumps(AttemptNodes(nodes=tuple(found)), indent=2) + "\n")


def send_start(hub: Hub, cycle: Cycle) -> None:
    """Tell the cycle's nodes; one that is not connected any more is noticed by its silence."""
    for node in cycle.nodes:
        hub.send(node.name, Start(cycle=cycle.epoch.cycle))


def answer_hello(nodes: Nodes, hub: Hub, node: str, hello: Hello, *, running: bool) -> None:
    """An agent that connects again may have missed an order: repeat what it should be doing."""
    epoch, view = nodes.epoch, nodes.views[node]
    current = epoch.cycle if running and epoch is not None and view.node_rank is not None else 0
    if hello.cycle not in (0, current):
        hub.send(node, Stop(cycle=hello.cycle, evidence=False))
    elif current and hello.cycle == 0 and view.report is None and view.torchrun_exit is None:
        hub.send(node, Start(cycle=current))


def end_cycle(
    nodes: Nodes, hub: Hub, edge: Edge, *, evidence: bool, pump: Callable[[float], None], silence_limit_s: float
) -> Teardown:
    """Stop the cycle on all its nodes. `pump(seconds)` waits that long for messages and takes them in.

    Every node dumps its stacks before it kills, all at once. Nodes that cannot answer do not hold up
    the others: a lost agent, and one that is silent for `silence_limit_s` (it beats while it stops its ranks).
    """
    started = time.monotonic()
    waiting = {view.name for view in nodes.training}
    if nodes.epoch is not None:
        for name in waiting:
            hub.send(name, Stop(cycle=nodes.epoch.cycle, evidence=evidence))
    while waiting and time.monotonic() - started < STOP_LIMIT_S:
        pump(0.05)
        waiting = {view.name for view in nodes.training if view.answered is None}
        waiting = {name for name in waiting if _can_answer(name, hub, edge, silence_limit_s)}
    answers = [view.answered for view in nodes.training if view.answered is not None]
    unanswered = tuple(view.name for view in nodes.training if view.answered is None)
    left: list[int | None] = [answer.remaining for answer in answers]
    left += [edge.clean(name) for name in unanswered]
    return Teardown(
        seconds=time.monotonic() - started,
        orphans=None if any(count is None for count in left) else sum(count or 0 for count in left),
        evidence=tuple(path for answer in answers for path in answer.evidence),
        unanswered=unanswered,
    )


def _can_answer(name: str, hub: Hub, edge: Edge, silence_limit_s: float) -> bool:
    silence_s = hub.silence_s(name)
    heard = silence_s is not None and silence_s <= silence_limit_s
    return heard and hub.connected(name) and edge.agent_dead(name) is None
