"""Differentiable tensor-parallel pairs. Each is the other's transpose: what one sums in forward, the other in backward.

    copy:     forward identity         backward all-reduce       enters a column-parallel region (f of arXiv 1909.08053)
    reduce:   forward all-reduce       backward identity         leaves a row-parallel region (g)

With sequence parallelism each rank keeps T/tp of the tokens between the regions (arXiv 2205.05198):

    gather:   forward all-gather       backward reduce-scatter   enters: [B, T/tp, …] → [B, T, …]
    scatter:  forward reduce-scatter   backward all-gather       leaves: [B, T, …] → [B, T/tp, …]

A plain in-place all-reduce in forward has no such backward: gradients would be wrong by the missing sum.
"""

from typing import Any

import torch

from trainer.comm import Group, all_gather, all_reduce, reduce_scatter


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


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _scattered(grads[0], ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _scattered(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _gathered(grads[0], ctx.group), None


def _gathered(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Every rank's [B, t, …] in rank order along dim 1: [B, size·t, …], contiguous. Comm: 1 all-gather."""
    batch, length, *rest = x.shape
    parts = x.new_empty(group.size, batch, length, *rest)
    all_gather(parts.view(-1), x.contiguous().view(-1), group)
    return parts.transpose(0, 1).reshape(batch, group.size * length, *rest)  # no copy for a batch of 1


def _scattered(x: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's dim-1 part of the sum: [B, T, …] → [B, T/size, …]. x is left as it is. Comm: 1 reduce-scatter."""
    batch, length, *rest = x.shape
    if length % group.size:
        raise ValueError(f"a sequence of {length} tokens cannot be cut into {group.size} equal parts (tp)")
    parts = x.reshape(batch, group.size, length // group.size, *rest).transpose(0, 1)
    scratch = torch.empty_like(parts, memory_format=torch.contiguous_format).copy_(parts)
    # A copy of its own, or the part would keep the memory of the whole alive.
    return reduce_scatter(scratch.view(-1), group).clone().view(batch, length // group.size, *rest)


def copy_to_tp(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Give x, equal on all tp ranks, to work that each rank does a part of. Backward: 1 all-reduce (tp)."""
    return x if group.size == 1 else _apply(_Copy, x, group)


def reduce_from_tp(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum each rank's partial x. Comm: 1 all-reduce (tp). Backward: identity."""
    return x if group.size == 1 else _apply(_Reduce, x, group)


def gather_to_tp(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Give each rank's part of the sequence to all: [B, T/tp, …] → [B, T, …]. Comm: 1 all-gather; backward: 1
    reduce-scatter (tp)."""
    return x if group.size == 1 else _apply(_Gather, x, group)


def scatter_from_tp(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum each rank's partial x and keep a part of the sequence: [B, T, …] → [B, T/tp, …]. Comm: 1 reduce-scatter, in
    rank order on gloo; backward: 1 all-gather (tp). ValueError unless tp divides T."""
    return x if group.size == 1 else _apply(_Scatter, x, group)


def _apply(function: type[torch.autograd.Function], x: torch.Tensor, group: Group) -> torch.Tensor:
    out: torch.Tensor = function.apply(x, group)  # type: ignore[no-untyped-call]
    return out
