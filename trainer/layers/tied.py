"""TiedParameter: one canonical tensor used in several places of the model, possibly on different pipeline stages.

Every site accumulates its gradient in a buffer of its own, also when all sites are on one rank; sites are added in
site order before the reduce-scatter. So the sum has the same bits on every pipeline layout, every copy gets it, and
the copies stay bitwise equal for ever.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainer.comm import Group, exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedParameter:
    """`name` is canonical; `sites` are (pipeline rank, live parameter name) in canonical order. Two sites at most."""

    name: str
    sites: tuple[tuple[int, str], ...]

    def local_sites(self, pp_rank: int) -> tuple[str, ...]:
        """Live names of the sites on `pp_rank`; the first shares its gradient buffer with the bucket."""
        return tuple(live for at, live in self.sites if at == pp_rank)

    def sum_sites(self, grads: Sequence[torch.Tensor], *, pp: Group) -> None:
        """Leave Σ sites in grads[0], which is the bucket's view; `grads` are the local sites' buffers.

        Comm: 1 send and 1 receive (pp) where the sites are on two ranks. A sum of two has the same bits both ways.
        """
        others = [at for at, _ in self.sites if at != pp.rank]
        assert len(grads) + len(others) == len(self.sites) == 2, "two sites, each here or on one other rank"
        other = exchange(grads[0], pp.ranks[others[0]], pp) if others else grads[1]
        grads[0].add_(other)
