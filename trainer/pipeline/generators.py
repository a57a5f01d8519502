"""The known schedules: pure functions (p ranks, m micro-batches, v stages per rank) → Schedule.

    name          rule on rank r                                            makespan − ideal          peak on rank r
    afab          all F, all B                                              (p − 1)(f + b + w)        m
    1f1b          p − 1 − r F, then pairs F B                               (p − 1)(f + b + w)        min(p − r, m)
    interleaved   (v − 1)p + 2(p − 1 − r) F of stages, then pairs F B       (p − 1)(f + b + w)/v      (warm-up + 1)/v
    zb-h1         1f1b of F and I, each W put off by r micro-batches        (p − 1)(f + b − w)        p, W included
    zb-v          two stages a rank, down and back up; each W fills a gap   (p − 1) b/2               p, W included

f, b, w are the costs of F, I and W of one micro-batch on one rank (a stage costs 1/v of it); B costs b + w. Peaks are
in micro-batches. m ≥ p (zb-v: m ≥ 2p), w ≤ f and w ≤ b (zb-v: f = b = w) where a formula needs it. With one stage,
1f1b is F0 B0 F1 B1 …: gradient accumulation is a schedule like any other.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

from trainer.pipeline.schedule import Action, Op, Placement, Schedule, ScheduleError

_Moves = Sequence[tuple[int, int]]  # (stage, micro-batch), in order


def afab(p: int, m: int, v: int = 1) -> Schedule:
    """All forwards, then all backwards, stage by stage (GPipe, arXiv 1811.06965)."""
    lists = []
    for rank in range(p):
        stages = range(rank, p * v, p)
        forward = [(stage, i) for stage in stages for i in range(m)]
        backward = [(stage, i) for stage in reversed(stages) for i in range(m)]
        lists.append(_pairs(forward, backward, warm_up=m * v))
    return Schedule(name="afab", placement=Placement.loop(p, v), m=m, lists=tuple(lists))


def one_f_one_b(p: int, m: int, v: int = 1) -> Schedule:
    """1F1B (arXiv 2104.04473): rank r warms up with p − 1 − r forwards. One stage a rank."""
    assert v == 1
    lists = []
    for rank in range(p):
        moves = [(rank, i) for i in range(m)]
        lists.append(_pairs(moves, moves, warm_up=p - 1 - rank))
    return Schedule(name="1f1b", placement=Placement.loop(p), m=m, lists=tuple(lists))


def interleaved(p: int, m: int, v: int = 1) -> Schedule:
    """Interleaved 1F1B (arXiv 2104.04473): every rank has v stages; micro-batches go through them in groups.

    The groups hold p micro-batches each. Where p does not divide m, the m micro-batches are shared out over ⌊m/p⌋
    groups as evenly as can be, larger ones first: none is smaller than p, so that a group's first micro-batch is back
    at rank 0 when its last one has left it. With m < p there is one group of m, legal, with the bubbles that so few
    micro-batches must have. With v = 1 this is 1F1B.
    """
    if v == 1:
        plain = one_f_one_b(p, m)
        return Schedule(name="interleaved", placement=plain.placement, m=m, lists=plain.lists)
    groups = _groups(m, max(1, m // p))
    lists = []
    for rank in range(p):
        stages = range(rank, p * v, p)
        forward = [(stage, i) for group in groups for stage in stages for i in group]
        backward = [(stage, i) for group in groups for stage in reversed(stages) for i in group]
        warm_up = (v - 1) * len(groups[0]) + 2 * (p - 1 - rank)
        lists.append(_pairs(forward, backward, warm_up=warm_up))
    return Schedule(name="interleaved", placement=Placement.loop(p, v), m=m, lists=tuple(lists))


def zb_h1(p: int, m: int, v: int = 1) -> Schedule:
    """ZB-H1 (arXiv 2401.10241): 1F1B of F and I; rank r runs each W r micro-batches late. One stage a rank.

    So no rank holds more than p micro-batches between F and W, and the W fill what would be the last bubbles.
    """
    assert v == 1
    lists = []
    for rank in range(p):
        warm_up = min(p - 1 - rank, m)
        actions = [Action(Op.F, rank, i) for i in range(warm_up)]
        for i in range(m):
            if warm_up + i < m:
                actions.append(Action(Op.F, rank, warm_up + i))
            actions.append(Action(Op.I, rank, i))
            if i >= rank:
                actions.append(Action(Op.W, rank, i - rank))
        actions += [Action(Op.W, rank, i) for i in range(max(0, m - rank), m)]
        lists.append(tuple(actions))
    return Schedule(name="zb-h1", placement=Placement.loop(p), m=m, lists=tuple(lists))


def zb_v(p: int, m: int, v: int = 2) -> Schedule:
    """ZB-V (arXiv 2405.15362): two stages a rank, V-shaped, so that the first and the last stage share rank 0."""
    assert v == 2
    lists = []
    for rank in range(p):
        # Made for at least 2p micro-batches; a shorter step is the same order without those that are not there.
        order = _zb_v_order(p, rank, max(m, 2 * p))
        counts = dict.fromkeys(order, 0)
        actions = []
        for move in order:
            op, is_second = move
            actions.append(Action(op, 2 * p - 1 - rank if is_second else rank, counts[move]))
            counts[move] += 1
        lists.append(tuple(action for action in actions if action.micro_batch < m))
    return Schedule(name="zb-v", placement=Placement.v_shape(p), m=m, lists=tuple(lists))


def _zb_v_order(p: int, rank: int, m: int) -> list[tuple[Op, bool]]:
    """(op, whether on the rank's second stage) in order; micro-batches rise for each."""
    f0, i0, w0 = ((op, False) for op in (Op.F, Op.I, Op.W))
    f1, i1, w1 = ((op, True) for op in (Op.F, Op.I, Op.W))
    order = [f0] * (2 * (p - rank) - 1) + [f1, f0] * rank + [f1, i1, w1] * (p - rank)
    ahead = 2 * p - rank - 1  # F of the first stage so far
    for _ in range(p, m):
        order += [f0] * (ahead < m) + [i0, w0, f1, i1, w1]
        ahead += 1
    order += [i0, i1] * rank + [i0, w0] * (p - rank)
    return order + [w1] * (m - order.count(w1)) + [w0] * (m - order.count(w0))


def forward_only(placement: Placement, m: int) -> Schedule:
    """Forwards alone, for evaluation: groups of p micro-batches go through a rank's stages one after another.

    By (group, stage, micro-batch) on every rank: an order in which nothing is needed before it is made, whatever the
    placement; and no more than p messages of a stage wait at a time.
    """
    p = placement.p
    groups = [range(start, min(start + p, m)) for start in range(0, m, p)]
    lists = tuple(
        tuple(Action(Op.F, stage, i) for group in groups for stage in placement.stages_of(rank) for i in group)
        for rank in range(p)
    )
    return Schedule(name="forward only", placement=placement, m=m, lists=lists)


GENERATORS: dict[str, Callable[[int, int, int], Schedule]] = {
    "1f1b": one_f_one_b,
    "afab": afab,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-v": zb_v,
}

DEFAULT_STAGES = {"1f1b": 1, "afab": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}
"""Stages per rank where nobody says how many."""

FIXED_STAGES = frozenset(("1f1b", "zb-h1", "zb-v"))
"""These have no other number."""


def placement_of(name: str, *, p: int, v: int) -> Placement:
    """Where the stages of the named schedule live."""
    return Placement.v_shape(p) if name == "zb-v" else Placement.loop(p, v)


MOST_PASSES = 500_000
"""Forward passes of a step over all stages; a list of more takes minutes to check, and no run has as many."""


def make_schedule(name: str, *, p: int, m: int, v: int | None = None) -> Schedule:
    """The named training schedule. Raises ScheduleError for an unknown name, a size below 1, a v it does not have."""
    if name not in GENERATORS:
        raise ScheduleError(f"unknown schedule {name!r}; known: {', '.join(GENERATORS)}")
    v = DEFAULT_STAGES[name] if v is None else v
    if min(p, m, v) < 1:
        raise ScheduleError(f"a schedule needs p ≥ 1 ranks, m ≥ 1 micro-batches, v ≥ 1 stages, not {p}, {m}, {v}")
    if p * m * v > MOST_PASSES:
        raise ScheduleError(
            f"p · v · m = {p} · {v} · {m} = {p * m * v:,} forward passes a step; at most {MOST_PASSES:,} are planned"
        )
    if name in FIXED_STAGES and v != DEFAULT_STAGES[name]:
        raise ScheduleError(
            f"schedule {name} is made for v = {DEFAULT_STAGES[name]} stages a rank, not {v}; leave v away, or use "
            "interleaved, afab or a file of your own"
        )
    return GENERATORS[name](p, m, v)


def _pairs(forward: _Moves, backward: _Moves, *, warm_up: int) -> tuple[Action, ...]:
    """`warm_up` forwards, then pairs of one forward and one backward, then the backwards that are left."""
    warm_up = min(warm_up, len(forward))
    actions = [Action(Op.F, *move) for move in forward[:warm_up]]
    for ahead, behind in zip(forward[warm_up:], backward, strict=False):
        actions += [Action(Op.F, *ahead), Action(Op.B, *behind)]
    return (*actions, *(Action(Op.B, *move) for move in backward[len(forward) - warm_up :]))


def _groups(m: int, count: int) -> list[range]:
    """range(m) cut into `count` runs, as equal as can be, larger ones first."""
    size, more = divmod(m, count)
    starts = [k * size + min(k, more) for k in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]
