"""Playing a schedule in time, and lowering: putting sends and receives into it, from what travels between stages. Pure.

Lowering plays the computations by a clock on which F, I and W take one unit each. When a stage has computed something
that a stage of another rank needs, its rank sends at once, and *the sender places the receive* at the consumer's
current position: so both ends of every pair of ranks list their messages in one order, which is what NCCL demands, and
a receive is posted as early as its message can exist. Stages of one rank hand over without a message.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from trainer.pipeline.schedule import GRADIENT, Action, Op, Schedule, ScheduleError, marked_grid

Links = Sequence[tuple[int, int]]
"""(source stage, consuming stage) of every edge of the graph."""

Result = tuple[Op, int, int]
"""What a computation leaves: (F: output, I: gradient of the input, W: gradient of the matrices; stage; micro-batch)."""


def chain(num_stages: int) -> tuple[tuple[int, int], ...]:
    """The links of a plain pipeline: each stage feeds the next."""
    return tuple((stage, stage + 1) for stage in range(num_stages - 1))


class Neighbours:
    """The links, by stage."""

    def __init__(self, links: Links, num_stages: int) -> None:
        stages = range(num_stages)
        self.sources = tuple(tuple(a for a, b in links if b == stage) for stage in stages)
        self.targets = tuple(tuple(b for a, b in links if a == stage) for stage in stages)

    def needs(self, action: Action) -> list[Result]:
        """What must have been computed before `action` may start."""
        stage, i = action.stage, action.micro_batch
        if action.op is Op.F:
            return [(Op.F, source, i) for source in self.sources[stage]]
        if action.op is Op.W:
            return [(Op.I, stage, i)]
        return [(Op.F, stage, i), *((Op.I, target, i) for target in self.targets[stage])]


def results(action: Action) -> tuple[Result, ...]:
    """What `action` leaves; B leaves what I and W do."""
    stage, i = action.stage, action.micro_batch
    return ((Op.I, stage, i), (Op.W, stage, i)) if action.op is Op.B else ((action.op, stage, i),)


class Event(NamedTuple):
    """An action starts or ends. At one time, ends come before starts."""

    time: float
    rank: int
    action: Action
    is_end: bool


def play(schedule: Schedule, links: Links, cost: Callable[[Action], float]) -> Iterator[Event]:
    """Carry out the lists of computations, each action as early as possible. Raises ScheduleError on a deadlock."""
    ranks, lists = schedule.placement.ranks, schedule.lists
    near = Neighbours(links, len(ranks))
    wakes = [
        sorted({ranks[s], *(ranks[other] for other in (*near.sources[s], *near.targets[s]))}) for s in range(len(ranks))
    ]
    at, is_busy = [0] * len(lists), [False] * len(lists)
    done: set[Result] = set()
    running: list[tuple[float, int, Action]] = []
    clock, asked = 0.0, list(range(len(lists)))
    while True:
        for rank in asked:
            if is_busy[rank] or at[rank] == len(lists[rank]):
                continue
            action = lists[rank][at[rank]]
            if done.issuperset(near.needs(action)):
                is_busy[rank] = True
                at[rank] += 1
                heapq.heappush(running, (clock + cost(action), rank, action))
                yield Event(clock, rank, action, False)
        if not running:
            break
        clock = running[0][0]
        waking: set[int] = set()
        while running and running[0][0] == clock:
            _, rank, action = heapq.heappop(running)
            is_busy[rank] = False
            done.update(results(action))
            waking.update(wakes[action.stage])
            yield Event(clock, rank, action, True)
        asked = sorted(waking)
    waiting = {r: near.needs(lists[r][k]) for r, k in enumerate(at) if k < len(lists[r])}
    if waiting:
        raise stuck(lists, at, {r: _first_missing(needs, done) for r, needs in waiting.items()})


def _first_missing(needs: Sequence[Result], done: set[Result]) -> str:
    op, stage, i = next(need for need in needs if need not in done)
    return f"{stage}{'B' if op is Op.I else op}{i}"


def stuck(lists: Sequence[Sequence[Action]], at: Sequence[int], waits_for: dict[int, str]) -> ScheduleError:
    """The error of lists that cannot go on: every waiting rank, its action and what that waits for."""
    waiting = [f"rank {r} at {lists[r][at[r]]} waits for {what}" for r, what in waits_for.items()]
    marks = frozenset((r, at[r]) for r in waits_for)
    return ScheduleError(
        f"the schedule deadlocks: {', '.join(waiting)}; move what is waited for before the marked action of its rank\n"
        + marked_grid(lists, marks)
    )


def lower(schedule: Schedule, links: Links) -> Schedule:
    """The schedule with communication. Raises ScheduleError where actions wait for each other for ever."""
    lists: list[list[Action]] = [[] for _ in schedule.lists]
    ranks = schedule.placement.ranks
    near = Neighbours(links, len(ranks))
    for _, rank, action, is_end in play(schedule, links, lambda action: 2 if action.op is Op.B else 1):
        if not is_end:
            lists[rank].append(action)
            continue
        for send, receive in _messages(action, near):
            if ranks[send.stage] != ranks[receive.stage]:
                lists[ranks[send.stage]].append(send)
                lists[ranks[receive.stage]].append(receive)
    return replace(schedule, lists=tuple(tuple(actions) for actions in lists))


def _messages(action: Action, near: Neighbours) -> Iterator[tuple[Action, Action]]:
    """The (send, receive) pairs that follow a computation."""
    stage, i = action.stage, action.micro_batch
    if action.op is Op.F:
        for peer in near.targets[stage]:
            yield Action(Op.SEND_F, stage, i, peer), Action(Op.RECV_F, peer, i, stage)
    elif action.op in GRADIENT:
        for peer in near.sources[stage]:
            yield Action(Op.SEND_B, stage, i, peer), Action(Op.RECV_B, peer, i, stage)
