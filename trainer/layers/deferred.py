"""A linear layer whose weight gradient waits: backward makes the input's gradient and notes (x, dy) for later.

    forward   y = x Wᵀ
    backward  dx = dy W            at once: the stage before needs it
              dW += dyᵀ x          by `add_weight_gradient`, when the schedule says so (W), or right after (B)

Noting is a side effect, which a compiler may only see as an opaque operator: a Python autograd.Function that appended
to a list would break its graph. So backward calls the operator `pawl::linear_input_grad`. Both kinds of backward go
through one list in one order, hence give the same bits.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from trainer.layers.wide import wide_mm


class WeightGradient(NamedTuple):
    """What a weight gradient is made of: the weight's address, x [..., in], dy [..., out]."""

    weight: int
    x: torch.Tensor
    dy: torch.Tensor


# All that was noted and not taken; the interpreter takes it after each backward. CUDA runs backward on a thread of its
# own, so this is the process's, not a thread's.
_NOTED: list[WeightGradient] = []

torch.library.define("pawl::linear_input_grad", "(Tensor dy, Tensor x, Tensor weight) -> Tensor")


@torch.library.impl("pawl::linear_input_grad", "CompositeExplicitAutograd")
def _linear_input_grad(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    _NOTED.append(WeightGradient(weight.data_ptr(), x.detach(), dy.detach()))  # not the graphs they hang on
    return dy @ weight


@torch.library.impl("pawl::linear_input_grad", "Meta")
def _shape_of_input_grad(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return dy.new_empty(*dy.shape[:-1], weight.shape[1])  # contiguous, as a product is, whatever x looks like


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        return torch.ops.pawl.linear_input_grad(grads[0], x, weight), None


def deferred_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x Wᵀ (+ b), x [..., in], W [out, in]. Only for backwards whose notes are taken: else W gets no gradient."""
    y: torch.Tensor = _DeferredLinear.apply(x, weight)  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias


def take_noted() -> list[WeightGradient]:
    """All weight gradients noted since the last call, in order."""
    noted = list(_NOTED)
    _NOTED.clear()
    return noted


@torch.no_grad()
def add_weight_gradient(parameter: nn.Parameter, note: WeightGradient) -> None:
    """parameter.grad += dyᵀ x, in place and in the gradient's dtype, which may be wider than that of x and dy."""
    assert parameter.grad is not None
    x, dy = note.x.flatten(0, -2), note.dy.flatten(0, -2)
    if parameter.grad.dtype == dy.dtype:
        parameter.grad.addmm_(dy.t(), x)
    else:
        parameter.grad.add_(wide_mm(dy.t(), x, parameter.grad.dtype))
