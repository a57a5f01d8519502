"""Schedules as data: what every pipeline rank computes, in order. Pure.

    1f1b, p = 4, m = 4        rank 0  0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
                              rank 3  3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3

A *stage* is a contiguous part of the model, 0 ≤ stage < S; a *rank* is a member of the pipeline group and holds one or
more stages, as the `Placement` says. Generators (`generators.py`) and files (`text.py`) list only what is computed;
sends and receives follow from the model's graph (`lower.py`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Op(StrEnum):
    """What an action does: F, B, I and W compute; the others move an edge's tensors for one micro-batch.

    I is the gradient of the stage's input (and of all parameters that are not matrices), W that of the matrices; B is
    both at once.
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 (the field's name)
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"


COMPUTE = frozenset((Op.F, Op.B, Op.I, Op.W))
SENDS = frozenset((Op.SEND_F, Op.SEND_B))
GRADIENT = frozenset((Op.B, Op.I))
"""The actions that make the gradient of a stage's input."""


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a rank's list. `peer` is the stage at the other end of a send or receive."""

    op: Op
    stage: int
    micro_batch: int
    peer: int | None = None

    def __str__(self) -> str:
        arrow = "" if self.peer is None else f"→{self.peer}" if self.op in SENDS else f"←{self.peer}"
        return f"{self.stage}{self.op}{self.micro_batch}{arrow}"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where stages live: `ranks[stage]` is the pipeline rank that holds it."""

    ranks: tuple[int, ...]

    @classmethod
    def loop(cls, p: int, v: int = 1) -> "Placement":
        """Stage s on rank s mod p: v times around the ranks."""
        return cls(tuple(range(p)) * v)

    @classmethod
    def v_shape(cls, p: int) -> "Placement":
        """Two stages a rank, down and back up: the first and the last stage share rank 0."""
        return cls((*range(p), *reversed(range(p))))

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.ranks)

    @property
    def p(self) -> int:
        """Pipeline ranks."""
        return max(self.ranks) + 1

    @property
    def v(self) -> int:
        """The most stages of any rank."""
        return max(Counter(self.ranks).values())

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, ascending."""
        return tuple(stage for stage, at in enumerate(self.ranks) if at == rank)


Lists = tuple[tuple[Action, ...], ...]
"""Per rank, its actions in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastGradients:
    """Stage → index of the action with the last gradients of its matrices (B or W), of all else (B or I)."""

    matrices: Mapping[int, int]
    others: Mapping[int, int]


def last_gradients(actions: Sequence[Action]) -> LastGradients:
    """Where in one rank's list the gradients of each stage become complete."""
    return LastGradients(
        matrices={action.stage: index for index, action in enumerate(actions) if action.op in (Op.B, Op.W)},
        others={action.stage: index for index, action in enumerate(actions) if action.op in GRADIENT},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One step of m micro-batches: `lists[rank]` are the actions of that rank in order."""

    name: str
    placement: Placement
    m: int
    lists: Lists

    @property
    def p(self) -> int:
        return len(self.lists)


class ScheduleError(ValueError):
    """A schedule that cannot be generated, read or carried out: what is wrong, and its grid where there is one."""


_WINDOW = 6


def marked_grid(lists: Sequence[Sequence[Action]], marks: frozenset[tuple[int, int]]) -> str:
    """One line per rank, actions by position; those at `marks` (rank, position) in [brackets], far ones left out.

    A mark behind the last action of a rank shows as [end].
    """
    positions = {position for _, position in marks}
    shown = sorted({near for at in positions for near in range(max(0, at - _WINDOW), at + _WINDOW + 1)})
    columns: list[list[str]] = []
    for before, position in zip((None, *shown), shown, strict=False):
        if position > (0 if before is None else before + 1):
            columns.append(["…"] * len(lists))
        columns.append([_cell(actions, position, (rank, position) in marks) for rank, actions in enumerate(lists)])
    if shown and shown[-1] + 1 < max(map(len, lists), default=0):
        columns.append(["…"] * len(lists))
    widths = [max(map(len, column)) for column in columns]
    rows = (
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in zip(*columns, strict=True)
    )
    return "\n".join(f"rank {rank}: {row}".rstrip() for rank, row in enumerate(rows))


def _cell(actions: Sequence[Action], position: int, is_marked: bool) -> str:
    text = str(actions[position]) if position < len(actions) else "end" if is_marked else ""
    return f"[{text}]" if is_marked else f" {text}"
