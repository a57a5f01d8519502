"""Validation of schedules: every property the interpreter relies on, checked on data before anything runs. Pure.

- each stage and micro-batch has its F once, and either its B or its I and W once (none at all: forward only), each on
  the rank that holds the stage;
- on each stage gradients are added in rising order of micro-batches, those of I and those of W apart: the sums then
  have the same bits under every schedule;
- dependencies can be met in the listed order;
- per ordered pair of ranks, messages are sent and received in one order (FIFO);
- no deadlock under rendezvous: each rank does its messages one by one, and both ends of one wait for each other. NCCL
  is like that: the messages of a group run in the order of their calls, a receive holding up the sends behind it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainer.pipeline.lower import Links, Neighbours, Result, lower, results, stuck
from trainer.pipeline.schedule import COMPUTE, GRADIENT, SENDS, Action, Op, Schedule, ScheduleError, marked_grid

_RECEIVE_OF = {Op.SEND_F: Op.RECV_F, Op.SEND_B: Op.RECV_B}
_OTHER_END = {**_RECEIVE_OF, **{receive: send for send, receive in _RECEIVE_OF.items()}}
_SENT = {Op.SEND_F: Op.F, Op.SEND_B: Op.I}
_NAMED = 6  # that many faults are listed


def validate(schedule: Schedule, links: Links) -> Schedule:
    """Check a compute schedule and its lowering; returns the lowered schedule.

    Raises ScheduleError naming the fault and the action, with the grid around it.
    """
    check_complete(schedule)
    check_order(schedule)
    lowered = lower(schedule, links)
    check_fifo(lowered)
    check_rendezvous(lowered, links)
    return lowered


def check_complete(schedule: Schedule) -> None:
    """Every stage and micro-batch has what it must have, once, on its own rank."""
    seen: dict[Result, tuple[int, int]] = {}
    faults: list[str] = []
    marks: set[tuple[int, int]] = set()
    ranks = schedule.placement.ranks
    is_forward_only = all(action.op is Op.F for actions in schedule.lists for action in actions)
    for rank, actions in enumerate(schedule.lists):
        for position, action in enumerate(actions):
            fault = None
            if action.op not in COMPUTE or action.stage >= len(ranks) or not 0 <= action.micro_batch < schedule.m:
                fault = f"{action} on rank {rank} is not of this schedule (S = {len(ranks)}, m = {schedule.m})"
            elif ranks[action.stage] != rank:
                fault = f"{action} stands on rank {rank}, but stage {action.stage} lives on rank {ranks[action.stage]}"
            elif twice := [seen[result] for result in results(action) if result in seen]:
                fault = f"{action} on rank {rank} repeats what was done before"
                marks.add(twice[0])
            if fault is not None:
                faults.append(fault)
                marks.add((rank, position))
            seen.update(dict.fromkeys(results(action), (rank, position)))
    for op in (Op.F,) if is_forward_only else (Op.F, Op.I, Op.W):
        for stage, rank in enumerate(ranks):
            if missing := [i for i in range(schedule.m) if (op, stage, i) not in seen]:
                what = {Op.F: "F", Op.I: "B or I", Op.W: "B or W"}[op]
                faults.append(f"stage {stage} on rank {rank} has no {what} of micro-batch {_some(missing)}")
                marks.add((rank, len(schedule.lists[rank])))
    if faults:
        raise ScheduleError(f"{_some(faults, '; ')}\n{marked_grid(schedule.lists, frozenset(marks))}")


def check_order(schedule: Schedule) -> None:
    """Gradients of each stage are added in rising order of micro-batches."""
    for rank, actions in enumerate(schedule.lists):
        for ops, what in ((GRADIENT, "B or I"), (frozenset((Op.B, Op.W)), "B or W")):
            last: dict[int, int] = {}
            for position, action in enumerate(actions):
                if action.op not in ops:
                    continue
                before = last.get(action.stage, -1)
                if action.micro_batch < before:
                    raise ScheduleError(
                        f"rank {rank} has {action} after micro-batch {before}: each stage must run its {what} in "
                        "rising order of micro-batches, or gradients would be summed in another order than under "
                        f"other schedules\n{marked_grid(schedule.lists, frozenset({(rank, position)}))}"
                    )
                last[action.stage] = action.micro_batch


def check_fifo(lowered: Schedule) -> None:
    """Both ends of every ordered pair of ranks list the same messages in the same order."""
    ranks, lists = lowered.placement.ranks, lowered.lists
    sent: dict[tuple[int, int], list[int]] = {}
    received: dict[tuple[int, int], list[int]] = {}
    for rank, actions in enumerate(lists):
        for position, action in enumerate(actions):
            if action.op in SENDS and action.peer is not None:
                sent.setdefault((rank, ranks[action.peer]), []).append(position)
            elif action.peer is not None:
                received.setdefault((ranks[action.peer], rank), []).append(position)
    for source, target in sorted({*sent, *received}):
        there, here = sent.get((source, target), []), received.get((source, target), [])
        pairs = enumerate(zip(there, here, strict=False))
        shorter = min(len(there), len(here))
        k = next((k for k, (a, b) in pairs if not _is_one_message(lists[source][a], lists[target][b])), shorter)
        if k < max(len(there), len(here)):
            marks = {(rank, at[k]) for rank, at in ((source, there), (target, here)) if k < len(at)}
            raise ScheduleError(
                f"messages from rank {source} to rank {target} are received in another order than sent, from message "
                f"{k} on\n{marked_grid(lists, frozenset(marks))}"
            )


def _is_one_message(a: Action, b: Action) -> bool:
    """Whether a and b are the two ends of one message."""
    is_same = a.stage == b.peer and a.peer == b.stage and a.micro_batch == b.micro_batch
    return is_same and _OTHER_END[a.op] is b.op


def check_rendezvous(lowered: Schedule, links: Links) -> None:
    """Play the lists: a send and its receive pass together or not at all; a computation waits for its inputs."""
    lists, ranks = lowered.lists, lowered.placement.ranks
    near = Neighbours(links, len(ranks))
    at = [0] * len(lists)
    done: set[Result] = set()
    asked = list(range(len(lists)))
    while asked:
        rank = asked.pop()
        actions = lists[rank]
        while at[rank] < len(actions):
            action = actions[at[rank]]
            if action.peer is None:
                if not done.issuperset(near.needs(action)):
                    break
                done.update(results(action))
            else:
                peer = ranks[action.peer]
                if at[peer] == len(lists[peer]) or not _is_one_message(action, lists[peer][at[peer]]):
                    break
                sent = action if action.op in SENDS else lists[peer][at[peer]]
                if (_SENT[sent.op], sent.stage, sent.micro_batch) not in done:
                    break
                at[peer] += 1
                asked.append(peer)
            at[rank] += 1
    waits_for = {
        rank: "its inputs" if actions[k].peer is None else str(_other_end(actions[k]))
        for rank, (actions, k) in enumerate(zip(lists, at, strict=True))
        if k < len(actions)
    }
    if waits_for:
        raise stuck(lists, at, waits_for)


def _other_end(action: Action) -> Action:
    """The receive of a send, the send of a receive."""
    assert action.peer is not None
    return Action(_OTHER_END[action.op], action.peer, action.micro_batch, action.stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """The most a rank holds at once, in stages × micro-batches, one entry per rank.

    `activations`: between F and the gradient of the input; `pending`: between that and the weights' gradients;
    `together`: the most of both at one time.
    """

    activations: tuple[int, ...]
    pending: tuple[int, ...]
    together: tuple[int, ...]


def peaks(schedule: Schedule) -> Peaks:
    """What each rank's order makes it hold. A forward-only schedule holds nothing."""
    if all(action.op is Op.F for actions in schedule.lists for action in actions):
        none = (0,) * schedule.p
        return Peaks(activations=none, pending=none, together=none)
    held = [_peaks_of_rank(actions) for actions in schedule.lists]
    activations, pending, together = zip(*held, strict=True)
    return Peaks(activations=activations, pending=pending, together=together)


def _peaks_of_rank(actions: Sequence[Action]) -> tuple[int, int, int]:
    alive = pending = 0
    peak = (0, 0, 0)
    for action in actions:
        alive += {Op.F: 1, Op.B: -1, Op.I: -1}.get(action.op, 0)
        pending += {Op.I: 1, Op.W: -1}.get(action.op, 0)
        now = (alive, pending, alive + pending)
        peak = (max(peak[0], now[0]), max(peak[1], now[1]), max(peak[2], now[2]))
    return peak


def peak_held(actions: Sequence[Action], alive: Sequence[int], pending: Sequence[int]) -> int:
    """The most a rank holds when a micro-batch on stage s takes alive[s] from F to B or I, and pending[s] from I to W.

    In the unit of `alive` and `pending`.
    """
    held = peak = 0
    for action in actions:
        if action.op is Op.F:
            held += alive[action.stage]
        elif action.op is Op.W:
            held -= pending[action.stage]
        elif action.op in GRADIENT:
            held -= alive[action.stage] - (pending[action.stage] if action.op is Op.I else 0)
        peak = max(peak, held)
    return peak


def _some(items: Iterable[object], separator: str = ", ") -> str:
    texts = [str(item) for item in items]
    more = f" and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
    return separator.join(texts[:_NAMED]) + more
