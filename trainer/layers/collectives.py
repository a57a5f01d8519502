"""Differentiable tensor-parallel pairs. Each is the other's transpose: what one sums in forward, the other in backward.

    copy:    forward identity        backward all-reduce   (enters a column-parallel region; 'f' of arXiv 1909.08053)
    reduce:  forward all-reduce      backward identity     (leaves a row-parallel region; 'g')

A plain in-place all-reduce in forward has no such backward: gradients would be wrong by the missing sum.
"""

from typing import Any

import torch

from trainer.comm import Group, all_reduce


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return all_reduce(grads[0].clone(memory_format=torch.contiguous_format), ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        return all_reduce(x.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def copy_to_tp(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Give x, equal on all tp ranks, to work that each rank does a part of. Backward: 1 all-reduce (tp)."""
    return x if group.size == 1 else _apply(_Copy, x, group)


def reduce_from_tp(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum each rank's partial x. Comm: 1 all-reduce (tp). Backward: identity."""
    return x if group.size == 1 else _apply(_Reduce, x, group)


def _apply(function: type[torch.autograd.Function], x: torch.Tensor, group: Group) -> torch.Tensor:
    out: torch.Tensor = function.apply(x, group)  # type: ignore[no-untyped-call]
    return out
