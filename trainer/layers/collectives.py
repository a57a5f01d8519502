"""Differentiable tensor-parallel pairs. Each is the other's transpose: what one sums in forward, the other in backward.

    copy:     forward identity         backward all-reduce       enters a column-parallel region (f of arXiv 1909.08053)
    reduce:   forward all-reduce       backward identity         leaves a row-parallel region (g)

With sequence parallelism each rank keeps T/tp of the tokens between the regions (arXiv 2205.05198):

    gather:   forward all-gather       backward reduce-scatter   enters: [B, T/tp, …] → [B, T, …]
    scatter:  forward reduce-scatter   backward all-gather       leaves: [B, T, …] → [B, T/tp, …]

A plain in-place all-reduce in forward has no such backward: gradients would be wrong by the missing sum.

Each communicates in an operator of its own, `pawl::…`, which says its group by number: a compiler takes it as one
opaque step, whatever the backend does inside.
"""

from typing import Any

import torch

from trainer.comm import Group, all_gather, all_reduce, group_of, reduce_scatter

# Each makes a new, contiguous tensor and leaves x as it is. `group`: `Group.number`.
for _name in ("sum_over", "gather_tokens", "scatter_tokens"):
    torch.library.define(f"pawl::{_name}", "(Tensor x, int group) -> Tensor")


@torch.library.impl("pawl::sum_over", "CompositeExplicitAutograd")
def _sum_over(x: torch.Tensor, group: int) -> torch.Tensor:
    """Σ over the group's ranks. Comm: 1 all-reduce."""
    return all_reduce(x.clone(memory_format=torch.contiguous_format), group_of(group))


@torch.library.impl("pawl::gather_tokens", "CompositeExplicitAutograd")
def _gather_tokens(x: torch.Tensor, group: int) -> torch.Tensor:
    """Every rank's [B, t, …] in rank order along dim 1: [B, size·t, …]. Comm: 1 all-gather."""
    ranks = group_of(group)
    batch, length, *rest = x.shape
    parts = x.new_empty(ranks.size, batch, length, *rest)
    all_gather(parts.view(-1), x.contiguous().view(-1), ranks)
    return parts.transpose(0, 1).reshape(batch, ranks.size * length, *rest)  # no copy for a batch of 1


@torch.library.impl("pawl::scatter_tokens", "CompositeExplicitAutograd")
def _scatter_tokens(x: torch.Tensor, group: int) -> torch.Tensor:
    """This rank's dim-1 part of the sum: [B, T, …] → [B, T/size, …]. Comm: 1 reduce-scatter."""
    ranks = group_of(group)
    batch, length, *rest = x.shape
    parts = x.reshape(batch, ranks.size, length // ranks.size, *rest).transpose(0, 1)
    scratch = torch.empty_like(parts, memory_format=torch.contiguous_format).copy_(parts)
    # A copy of its own, or the part would keep the memory of the whole alive.
    return reduce_scatter(scratch.view(-1), ranks).clone().view(batch, length // ranks.size, *rest)


@torch.library.impl("pawl::sum_over", "Meta")
def _summed_shape(x: torch.Tensor, group: int) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.impl("pawl::gather_tokens", "Meta")
def _gathered_shape(x: torch.Tensor, group: int) -> torch.Tensor:
    return x.new_empty(x.shape[0], x.shape[1] * group_of(group).size, *x.shape[2:])


@torch.library.impl("pawl::scatter_tokens", "Meta")
def _scattered_shape(x: torch.Tensor, group: int) -> torch.Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // group_of(group).size, *x.shape[2:])


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: int) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return torch.ops.pawl.sum_over(grads[0], ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: int) -> torch.Tensor:
        out: torch.Tensor = torch.ops.pawl.sum_over(x, group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: int) -> torch.Tensor:
        ctx.group = group
        out: torch.Tensor = torch.ops.pawl.gather_tokens(x, group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return torch.ops.pawl.scatter_tokens(grads[0], ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: int) -> torch.Tensor:
        ctx.group = group
        out: torch.Tensor = torch.ops.pawl.scatter_tokens(x, group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return torch.ops.pawl.gather_tokens(grads[0], ctx.group), None


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
    if x.shape[1] % group.size:
        raise ValueError(f"a sequence of {x.shape[1]} tokens cannot be cut into {group.size} equal parts (tp)")
    return x if group.size == 1 else _apply(_Scatter, x, group)


def _apply(function: type[torch.autograd.Function], x: torch.Tensor, group: Group) -> torch.Tensor:
    out: torch.Tensor = function.apply(x, group.number)  # type: ignore[no-untyped-call]
    return out
