"""Lowering: put sends and receives into a schedule, from what travels between stages.

Actions are played in dependency order. When a stage has computed something another stage needs, it sends at once, and
*the sender places the receive* at the consumer's current position: so both ends of every pair list their messages in
one order, which is what NCCL demands, and a receive is posted as early as its message can exist.
"""

from collections.abc import Iterable, Sequence

from trainer.pipeline.schedule import Action, Op, Schedule

Links = Sequence[tuple[int, int]]


def chain(p: int) -> tuple[tuple[int, int], ...]:
    """The links of a plain pipeline: each stage feeds the next."""
    return tuple((stage, stage + 1) for stage in range(p - 1))


def needs(action: Action, links: Links) -> tuple[Action, ...]:
    """The computations that must be over before this one may start."""
    stage, i = action.stage, action.micro_batch
    if action.op is Op.F:
        return tuple(Action(Op.F, source, i) for source, target in links if target == stage)
    gradients = tuple(Action(Op.B, target, i) for source, target in links if source == stage)
    return (Action(Op.F, stage, i), *gradients)


def stuck_message(lists: Sequence[Sequence[Action]], at: Sequence[int]) -> str:
    """What every unfinished rank waits at, for the error of a schedule that cannot go on."""
    waiting = [
        f"rank {r} at {actions[k]}" for r, (actions, k) in enumerate(zip(lists, at, strict=True)) if k < len(actions)
    ]
    return "the schedule deadlocks: " + ", ".join(waiting) + "; check the order of these ranks' actions"


def lower(schedule: Schedule, links: Links) -> Schedule:
    """The schedule with communication. Rank = stage. Raises ValueError where actions wait for each other for ever."""
    lists: list[list[Action]] = [[] for _ in schedule]
    at = [0] * len(schedule)
    done: set[Action] = set()
    while any(k < len(actions) for k, actions in zip(at, schedule, strict=True)):
        ready = [
            actions[k]
            for k, actions in zip(at, schedule, strict=True)
            if k < len(actions) and all(need in done for need in needs(actions[k], links))
        ]
        if not ready:
            raise ValueError(stuck_message(schedule, at))
        for action in ready:
            lists[action.stage].append(action)
            at[action.stage] += 1
        done.update(ready)
        for action in ready:
            for send, receive in _messages(action, links):
                lists[send.stage].append(send)
                lists[receive.stage].append(receive)
    return tuple(tuple(actions) for actions in lists)


def _messages(action: Action, links: Links) -> Iterable[tuple[Action, Action]]:
    """The (send, receive) pairs that follow a computation."""
    stage, i = action.stage, action.micro_batch
    if action.op is Op.F:
        targets = [target for source, target in links if source == stage]
        ops = (Op.SEND_F, Op.RECV_F)
    else:
        targets = [source for source, target in links if target == stage]
        ops = (Op.SEND_B, Op.RECV_B)
    for peer in targets:
        yield Action(ops[0], stage, i, peer), Action(ops[1], peer, i, stage)
