"""Validation of schedules: every property the interpreter relies on, checked on data before anything runs.

- each F (and B) of every stage and micro-batch exactly once, on its own rank;
- dependencies can be met in the listed order;
- per ordered pair of ranks, messages are sent and received in one order (FIFO);
- no deadlock under rendezvous: each rank does its messages one by one, and both ends of one wait for each other. NCCL
  is like that: the messages of a group run in the order of their calls, a receive holding up the sends behind it.
"""

from collections import Counter
from collections.abc import Sequence

from trainer.pipeline.lower import Links, lower, needs, stuck_message
from trainer.pipeline.schedule import Action, Op, Schedule

_COMPUTE = (Op.F, Op.B)
_RECEIVE_OF = {Op.SEND_F: Op.RECV_F, Op.SEND_B: Op.RECV_B}
_OTHER_END = {**_RECEIVE_OF, **{receive: send for send, receive in _RECEIVE_OF.items()}}


def validate(schedule: Schedule, links: Links, *, m: int) -> Schedule:
    """Check a compute schedule and its lowering; returns the lowered schedule. Raises ValueError naming the fault."""
    check_complete(schedule, m=m)
    lowered = lower(schedule, links)
    check_fifo(lowered)
    check_rendezvous(lowered, links)
    return lowered


def check_complete(schedule: Schedule, *, m: int) -> None:
    """Every rank has each of its F once, and each B once unless the schedule is forward-only."""
    ops = {action.op for actions in schedule for action in actions if action.op in _COMPUTE}
    for rank, actions in enumerate(schedule):
        counts = Counter(action for action in actions if action.op in _COMPUTE)
        expected = {Action(op, rank, i) for op in ops for i in range(m)}
        missing = [str(action) for action in sorted(expected - set(counts), key=str)]
        extra = [str(action) for action, n in counts.items() if n > 1 or action not in expected]
        if missing or extra:
            raise ValueError(f"rank {rank}: missing actions {missing or 'none'}, repeated or foreign {extra or 'none'}")


def check_fifo(lowered: Schedule) -> None:
    """Both ends of every ordered pair list the same messages in the same order."""
    sent: dict[tuple[int, int], list[tuple[Op, int]]] = {}
    received: dict[tuple[int, int], list[tuple[Op, int]]] = {}
    for actions in lowered:
        for action in actions:
            if action.peer is None:
                continue
            if action.op in _RECEIVE_OF:
                message = (_RECEIVE_OF[action.op], action.micro_batch)
                sent.setdefault((action.stage, action.peer), []).append(message)
            else:
                received.setdefault((action.peer, action.stage), []).append((action.op, action.micro_batch))
    for pair in sorted({*sent, *received}):
        if sent.get(pair) != received.get(pair):
            raise ValueError(f"messages from rank {pair[0]} to rank {pair[1]} are received in another order than sent")


def check_rendezvous(lowered: Schedule, links: Links) -> None:
    """Play the lists: a send and its receive pass together or not at all; a computation waits for its inputs."""
    at = [0] * len(lowered)
    done: set[Action] = set()

    def passing(action: Action) -> tuple[int, ...]:
        """The ranks that get past their current action, of which `action` is one."""
        if action.peer is None:
            return (action.stage,) if all(need in done for need in needs(action, links)) else ()
        other_end = Action(_OTHER_END[action.op], action.peer, action.micro_batch, action.stage)
        return (action.stage, action.peer) if lowered[action.peer][at[action.peer] :][:1] == (other_end,) else ()

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(lowered):
            while at[rank] < len(actions) and (ranks := passing(actions[at[rank]])):
                done.add(actions[at[rank]])
                for passed in ranks:
                    at[passed] += 1
                moved = True
    if any(k < len(actions) for k, actions in zip(at, lowered, strict=True)):
        raise ValueError(stuck_message(lowered, at))


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the most micro-batches whose activations are alive at once."""
    return tuple(_peak(actions) for actions in schedule)


def _peak(actions: Sequence[Action]) -> int:
    alive, peak = 0, 0
    for action in actions:
        alive += {Op.F: 1, Op.B: -1}.get(action.op, 0)
        peak = max(peak, alive)
    return peak
