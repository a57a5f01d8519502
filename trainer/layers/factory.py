"""LayerFactory: makes the layers a model asks for, so that models name shapes and never parallelism.

Between `share` and a row layer hidden states are [B, T, D]; elsewhere [B, t, D], where t is T, or T / tp with sequence
parallelism (arXiv 2205.05198): each rank then has other tokens, in rank order.

Parameters are made on the meta device; the engine gives them their place in the flat buckets.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from trainer.comm import Group
from trainer.layers.collectives import copy_to_tp, gather_to_tp
from trainer.layers.linear import ColumnParallelLinear, Linear, RowParallelLinear
from trainer.layers.norm import LayerNorm, RMSNorm
from trainer.layers.vocab import CROSS_ENTROPY, Objective, VocabParallelEmbedding, VocabParallelHead
from trainer.models.families import Norm


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFactory:
    """Layers for one tensor-parallel group and compute dtype; `linear` does the products of column and row layers.

    `sequence_parallel`: tokens are cut over tp between the tensor-parallel regions. `objective`: what the
    head's gradient is of.
    """

    tp: Group
    dtype: torch.dtype
    linear: Linear = F.linear
    sequence_parallel: bool = False
    objective: Objective = CROSS_ENTROPY

    def column(self, in_features: int, out_features: int, *, bias: bool = False) -> ColumnParallelLinear:
        """A layer whose input went through `share`."""
        return ColumnParallelLinear(
            in_features, out_features, tp=self.tp, dtype=self.dtype, bias=bias, input_is_shared=True,
            linear=self.linear,
        )  # fmt: skip

    def row(self, in_features: int, out_features: int, *, bias: bool = False) -> RowParallelLinear:
        return RowParallelLinear(
            in_features, out_features, tp=self.tp, dtype=self.dtype, bias=bias, linear=self.linear,
            sequence_parallel=self.sequence_parallel,
        )  # fmt: skip

    def norm(self, hidden_size: int, *, eps: float, kind: Norm = Norm.RMS) -> RMSNorm | LayerNorm:
        return (RMSNorm if kind is Norm.RMS else LayerNorm)(hidden_size, eps=eps, dtype=self.dtype)

    def embedding(self, vocab_size: int, hidden_size: int) -> VocabParallelEmbedding:
        return VocabParallelEmbedding(
            vocab_size, hidden_size, tp=self.tp, dtype=self.dtype, sequence_parallel=self.sequence_parallel
        )

    def head(self, vocab_size: int, hidden_size: int) -> VocabParallelHead:
        return VocabParallelHead(
            vocab_size, hidden_size, tp=self.tp, dtype=self.dtype, sequence_parallel=self.sequence_parallel,
            objective=self.objective,
        )  # fmt: skip

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """Enter a region of column layers, [B, t, D] → [B, T, D]: one backward reduction for all of them."""
        return gather_to_tp(x, self.tp) if self.sequence_parallel else copy_to_tp(x, self.tp)

    def tokens_here(self, length: int) -> int:
        """t: how many of a sequence's tokens this rank has between the regions."""
        return length // self.tp.size if self.sequence_parallel else length
