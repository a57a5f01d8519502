"""Rank arithmetic of the device mesh, without torch.

    R = tp + TP·(cp + CP·(pp + PP·dp))

One array holds the mesh; every group is a slice of it. `tp` varies fastest, so the ranks of a tensor-parallel group
are neighbours on one node; `dp` varies slowest.
"""

from dataclasses import dataclass
from enum import StrEnum
from itertools import product

import numpy as np
import numpy.typing as npt


class Axis(StrEnum):
    """The axes of the mesh, slowest first."""

    DP = "dp"
    PP = "pp"
    CP = "cp"
    TP = "tp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Coord:
    """Place of one rank on the mesh; each coordinate is 0-based."""

    dp: int
    pp: int
    cp: int = 0
    tp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Sizes of the axes. Raises ValueError for a size below 1."""

    dp: int = 1
    pp: int = 1
    tp: int = 1
    cp: int = 1

    def __post_init__(self) -> None:
        for axis in Axis:
            if self.size(axis) < 1:
                raise ValueError(f"mesh axis {axis} has size {self.size(axis)}; every axis needs at least 1")

    @property
    def world_size(self) -> int:
        return self.dp * self.pp * self.cp * self.tp

    def size(self, axis: Axis | str) -> int:
        return int(getattr(self, Axis(axis)))

    @property
    def ranks(self) -> npt.NDArray[np.int64]:
        """All global ranks, shape (dp, pp, cp, tp)."""
        return np.arange(self.world_size, dtype=np.int64).reshape(self.dp, self.pp, self.cp, self.tp)

    @property
    def world_rank_matrix(self) -> npt.NDArray[np.int64]:
        """Global ranks of context-parallel rank 0, shape (dp, pp, tp)."""
        return self.ranks[:, :, 0, :]

    def coord(self, rank: int) -> Coord:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside the mesh of {self.world_size} ranks (0 to {self.world_size - 1})")
        dp, pp, cp, tp = (int(i) for i in np.unravel_index(rank, (self.dp, self.pp, self.cp, self.tp)))
        return Coord(dp=dp, pp=pp, cp=cp, tp=tp)

    def rank(self, coord: Coord) -> int:
        return int(self.ranks[coord.dp, coord.pp, coord.cp, coord.tp])

    def ranks_along(self, axis: Axis | str, rank: int) -> tuple[int, ...]:
        """The group of `rank` along `axis`, in coordinate order: all other coordinates equal."""
        at = self.coord(rank)
        index = tuple(slice(None) if a == Axis(axis) else getattr(at, a) for a in Axis)
        return tuple(int(r) for r in self.ranks[index])

    def groups(self, axis: Axis | str) -> tuple[tuple[int, ...], ...]:
        """Every group along `axis`, ordered by first rank; together they cover each rank once."""
        others = [range(1) if a == Axis(axis) else range(self.size(a)) for a in Axis]
        firsts = (self.rank(Coord(dp=d, pp=p, cp=c, tp=t)) for d, p, c, t in product(*others))
        return tuple(self.ranks_along(axis, first) for first in firsts)
