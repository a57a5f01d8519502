"""Column- and row-parallel linear layers; weights are [out, in] as in Hugging Face.

x ──copy──▶ column (rows of W cut: each rank has some outputs) ──▶ row (columns of W cut) ──reduce──▶ y

With sequence parallelism copy and reduce are gather and scatter: x and y are [B, T/tp, …] then.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from trainer.comm import Group
from trainer.layers.collectives import copy_to_tp, reduce_from_tp, scatter_from_tp

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(x [..., in], W [out, in], b or None) → x Wᵀ (+ b)."""


def _divide(n: int, parts: int, what: str) -> int:
    if n % parts:
        raise ValueError(f"{what} = {n} is not divisible by tp = {parts}")
    return n // parts


class ColumnParallelLinear(nn.Module):
    """y = x Wᵀ (+ b) with W's rows cut over tp. x[..., in] equal on all ranks, y[..., out / tp] different.

    `input_is_shared`: the caller already entered the region with `copy_to_tp` (several layers can share one entry,
    hence one all-reduce in backward). `linear` does the product (`deferred.py` has one whose W gradient waits).
    """

    def __init__(
        self, in_features: int, out_features: int, *, tp: Group, dtype: torch.dtype, bias: bool = False,
        input_is_shared: bool = False, linear: Linear = F.linear,
    ) -> None:  # fmt: skip
        super().__init__()
        local = _divide(out_features, tp.size, "out_features")
        self.tp, self.input_is_shared, self.linear = tp, input_is_shared, linear
        self.weight = nn.Parameter(torch.empty(local, in_features, dtype=dtype, device="meta"))
        self.bias = nn.Parameter(torch.empty(local, dtype=dtype, device="meta")) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x if self.input_is_shared else copy_to_tp(x, self.tp), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """y = x Wᵀ (+ b) with W's columns cut over tp. x[..., in / tp] different per rank, y[..., out] equal on all.

    With `sequence_parallel` x is [B, T, in / tp] and y [B, T / tp, out], other tokens on each rank. The bias is whole
    on every rank and added once, after the sum. Comm: 1 all-reduce or reduce-scatter (tp).
    """

    def __init__(
        self, in_features: int, out_features: int, *, tp: Group, dtype: torch.dtype, bias: bool = False,
        linear: Linear = F.linear, sequence_parallel: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        local = _divide(in_features, tp.size, "in_features")
        self.tp, self.linear, self.leave = tp, linear, scatter_from_tp if sequence_parallel else reduce_from_tp
        self.weight = nn.Parameter(torch.empty(out_features, local, dtype=dtype, device="meta"))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device="meta")) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.leave(self.linear(x, self.weight, None), self.tp)
        return y if self.bias is None else y + self.bias
