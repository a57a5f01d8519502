"""A clock for schedules: makespan and bubble under given costs, with and without the clipping barrier. Pure.

The bubble has two customary denominators that are often confused: of the *ideal* time (all ranks always busy) it is
(p − 1)/m for AFAB and 1F1B, of the *total* time (p − 1)/(m + p − 1). Both are given.

Clipping needs the norm of the whole gradient, hence an all-reduce over all ranks before any of them updates: the step
takes as long as the last rank, from the first action to the last (`makespan`). Without that barrier each rank could go
on to its next step as soon as its own list is done; `unsynchronised_period` is the time of a step then.
"""

from dataclasses import dataclass, replace

from trainer.pipeline.lower import Links, play
from trainer.pipeline.schedule import Action, Op, Schedule

_STEPS = 4  # played without a barrier: by the last of them the ranks have fallen into their period


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Time units of one micro-batch through a rank's whole share of the model; messages are free. B = input + weight.

    A stage takes its share of it: 1/v with v stages on the rank.
    """

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0

    def of(self, op: Op) -> float:
        return {Op.F: self.forward, Op.I: self.input, Op.W: self.weight, Op.B: self.input + self.weight}[op]


@dataclass(frozen=True, slots=True)
class Span:
    """One computation on the clock."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Per rank, its computations in order; `ideal` is the work of the busiest rank."""

    spans: tuple[tuple[Span, ...], ...]
    makespan: float
    ideal: float


def simulate(schedule: Schedule, links: Links, costs: Costs | None = None) -> Simulation:
    """Run a compute schedule with each action as early as possible. Raises ScheduleError on a deadlock."""
    spans = _play_spans(schedule, links, Costs() if costs is None else costs)
    return Simulation(
        spans=spans,
        makespan=max(row[-1].end for row in spans),
        ideal=max(sum(span.end - span.start for span in row) for row in spans),
    )


def unsynchronised_period(schedule: Schedule, links: Links, costs: Costs) -> float:
    """Time from the end of one step to that of the next when no rank waits for the others between them."""
    ends = _step_ends(schedule, links, costs)
    return ends[-1] - ends[-2]


def _play_spans(schedule: Schedule, links: Links, costs: Costs) -> tuple[tuple[Span, ...], ...]:
    """When each computation of each rank runs."""
    ranks, v = schedule.placement.ranks, schedule.placement.v
    share = [v / len(schedule.placement.stages_of(rank)) for rank in range(schedule.p)]
    # The clock counts in v-ths of a micro-batch, so that equal times are equal numbers where costs are whole.
    starts: list[list[tuple[Action, float]]] = [[] for _ in schedule.lists]
    ends: list[list[float]] = [[] for _ in schedule.lists]
    for time, rank, action, is_end in play(schedule, links, lambda a: costs.of(a.op) * share[ranks[a.stage]]):
        if is_end:
            ends[rank].append(time / v)
        else:
            starts[rank].append((action, time / v))
    return tuple(
        tuple(Span(action, start, end) for (action, start), end in zip(began, ended, strict=True))
        for began, ended in zip(starts, ends, strict=True)
    )


def _step_ends(schedule: Schedule, links: Links, costs: Costs) -> list[float]:
    """When each of several steps is over on all ranks, with no barrier between them."""
    m = schedule.m
    lists = tuple(
        tuple(
            replace(action, micro_batch=action.micro_batch + step * m) for step in range(_STEPS) for action in actions
        )
        for actions in schedule.lists
    )
    ends = [0.0] * _STEPS
    for spans in _play_spans(replace(schedule, lists=lists), links, costs):
        for span in spans:
            step = span.action.micro_batch // m
            ends[step] = max(ends[step], span.end)
    return ends
