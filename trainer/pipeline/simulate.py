"""A clock for schedules: makespan and bubble under given costs, and the grid a person reads. Pure.

The bubble has two customary denominators that are often confused: of the *ideal* time (all ranks always busy) it is
(p − 1)/m for AFAB and 1F1B, of the *total* time (p − 1)/(m + p − 1). Both are printed.
"""

from dataclasses import dataclass

from trainer.pipeline.lower import Links, needs, stuck_message
from trainer.pipeline.schedule import Action, Op, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Time units of one micro-batch through one stage; messages are free."""

    forward: float = 1.0
    backward: float = 2.0

    def of(self, action: Action) -> float:
        return {Op.F: self.forward, Op.B: self.backward}[action.op]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """When each computation starts and ends, per rank in order; `makespan` is the last end."""

    spans: tuple[tuple[tuple[Action, float, float], ...], ...]
    makespan: float
    ideal: float

    @property
    def bubble_of_ideal(self) -> float:
        """Idle time of a rank divided by its busy time, for the busiest rank."""
        return (self.makespan - self.ideal) / self.ideal

    @property
    def bubble_of_total(self) -> float:
        return (self.makespan - self.ideal) / self.makespan


def simulate(schedule: Schedule, links: Links, costs: Costs | None = None) -> Simulation:
    """Run a compute schedule with each action as early as possible. Raises ValueError on a deadlock."""
    costs = Costs() if costs is None else costs
    ends: dict[Action, float] = {}
    free = [0.0] * len(schedule)
    at = [0] * len(schedule)
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in schedule]
    while any(k < len(actions) for k, actions in zip(at, schedule, strict=True)):
        moved = False
        for rank, actions in enumerate(schedule):
            while at[rank] < len(actions) and all(need in ends for need in needs(actions[at[rank]], links)):
                action = actions[at[rank]]
                start = max([free[rank], *(ends[need] for need in needs(action, links))])
                free[rank] = ends[action] = start + costs.of(action)
                spans[rank].append((action, start, free[rank]))
                at[rank] += 1
                moved = True
        if not moved:
            raise ValueError(stuck_message(schedule, at))
    ideal = max(sum(costs.of(action) for action in actions) for actions in schedule)
    return Simulation(spans=tuple(tuple(s) for s in spans), makespan=max(free), ideal=ideal)


def grid(simulation: Simulation) -> str:
    """One line per rank, one column per time unit; a B fills two columns with its number and `·` is idle."""
    width = max(len(_cell(action)) for span in simulation.spans for action, _, _ in span) + 1
    columns = round(simulation.makespan)
    lines = []
    for rank, spans in enumerate(simulation.spans):
        cells = ["·"] * columns
        for action, start, end in spans:
            for column in range(round(start), round(end)):
                cells[column] = _cell(action)
        lines.append(f"rank {rank}  " + "".join(cell.ljust(width) for cell in cells).rstrip())
    return "\n".join(lines)


def _cell(action: Action) -> str:
    return f"{action.op}{action.micro_batch}"
