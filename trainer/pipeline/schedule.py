"""Schedules as data: a pure function (p stages, m micro-batches) → the list of actions of every rank.

    1f1b, p = 4, m = 4        rank 0  F0 F1 F2 F3 B0 B1 B2 B3
                              rank 3  F0 B0 F1 B1 F2 B2 F3 B3

A generator lists only what is computed; sends and receives follow from the graph (`lower`). With one stage, 1f1b is
F0 B0 F1 B1 …: gradient accumulation is a schedule like any other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Op(StrEnum):
    """What an action does. F and B compute; the others move an edge's tensors for one micro-batch."""

    F = "F"
    B = "B"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a rank's list; `stage` computes it, `peer` is the other stage of a send or receive."""

    op: Op
    stage: int
    micro_batch: int
    peer: int | None = None

    def __str__(self) -> str:
        arrow = "" if self.peer is None else f"→{self.peer}" if self.op.startswith("SEND") else f"←{self.peer}"
        return f"{self.stage}{self.op}{self.micro_batch}{arrow}"


Schedule = tuple[tuple[Action, ...], ...]


def afab(p: int, m: int) -> Schedule:
    """All forwards, then all backwards (GPipe, arXiv 1811.06965). Peak activations: m on every rank."""
    return tuple(
        tuple(Action(op, rank, i) for op in (Op.F, Op.B) for i in range(m))
        for rank in range(p)
    )  # fmt: skip


def one_f_one_b(p: int, m: int) -> Schedule:
    """1F1B (arXiv 2104.04473): stage r warms up with p − 1 − r forwards. Peak activations: min(p − r, m)."""
    return tuple(_one_f_one_b_rank(rank, warm_up=min(p - 1 - rank, m), m=m) for rank in range(p))


def _one_f_one_b_rank(rank: int, *, warm_up: int, m: int) -> tuple[Action, ...]:
    actions = [Action(Op.F, rank, i) for i in range(warm_up)]
    for i in range(m - warm_up):
        actions += [Action(Op.F, rank, warm_up + i), Action(Op.B, rank, i)]
    return (*actions, *(Action(Op.B, rank, i) for i in range(m - warm_up, m)))


def forward_only(p: int, m: int) -> Schedule:
    """Forwards alone, for evaluation."""
    return tuple(tuple(Action(Op.F, rank, i) for i in range(m)) for rank in range(p))


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {"1f1b": one_f_one_b, "afab": afab}


def make_schedule(name: str, *, p: int, m: int) -> Schedule:
    """The named training schedule. Raises ValueError for an unknown name or a size below 1."""
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}; known: {', '.join(SCHEDULES)}")
    if p < 1 or m < 1:
        raise ValueError(f"a schedule needs at least 1 stage and 1 micro-batch, not p = {p}, m = {m}")
    return SCHEDULES[name](p, m)
