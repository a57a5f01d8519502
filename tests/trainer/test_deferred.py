"""Linear layers whose weight gradient waits: the same numbers as torch's, eager and compiled, however late."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainer.layers.deferred import WeightGradient, add_weight_gradient, deferred_linear, take_noted


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    take_noted()
    yield
    assert take_noted() == []


def parameter(*shape: int, dtype: torch.dtype, grad: torch.dtype, seed: int) -> nn.Parameter:
    made = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype))
    made.grad_dtype = grad
    made.grad = torch.zeros(shape, dtype=grad)
    return made


@pytest.mark.parametrize(
    ("dtype", "grad", "tolerance"),
    [
        (torch.float64, torch.float64, 1e-14),
        (torch.float32, torch.float32, 1e-6),
        (torch.bfloat16, torch.float32, 1e-6),
    ],
)
@pytest.mark.parametrize("shape", [(5, 6), (2, 5, 6)])
def test_both_gradients_are_those_of_torch(
    dtype: torch.dtype, grad: torch.dtype, tolerance: float, shape: tuple[int, ...]
) -> None:
    ours, theirs = (parameter(4, 6, dtype=dtype, grad=grad, seed=1) for _ in range(2))
    bias = torch.randn(4, dtype=dtype).requires_grad_()
    x = torch.randn(shape, dtype=dtype)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    for _ in range(2):  # gradients accumulate
        dy = torch.randn(*shape[:-1], 4, dtype=dtype)
        deferred_linear(a, ours, bias).backward(dy)
        F.linear(b, theirs, bias.detach()).backward(dy)
    assert ours.grad is not None and not ours.grad.any(), "the weight's gradient waits"
    assert torch.equal(a.grad, b.grad) and bias.grad is not None  # type: ignore[arg-type]
    notes = take_noted()
    for note in notes:
        add_weight_gradient(ours, note)
    expected = theirs.grad
    if grad != dtype:  # torch rounds each product to the narrow dtype before it adds it
        expected = sum(n.dy.flatten(0, -2).double().T @ n.x.flatten(0, -2).double() for n in notes).to(grad)  # type: ignore[union-attr]
    torch.testing.assert_close(ours.grad, expected, rtol=tolerance, atol=tolerance)


def test_notes_keep_factors_and_no_graph() -> None:
    weight = parameter(4, 6, dtype=torch.float32, grad=torch.float32, seed=1)
    x = torch.randn(5, 6).requires_grad_()
    deferred_linear(x * 2, weight).sum().backward()
    (note,) = take_noted()
    assert note.weight == weight.data_ptr() and note.x.grad_fn is None and not note.dy.requires_grad


class _Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            parameter(6, 6, dtype=torch.float32, grad=torch.float32, seed=i) for i in range(7)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x + torch.tanh(deferred_linear(x, weight))
        return x


def notes_of(step: nn.Module) -> list[WeightGradient]:
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(3)).requires_grad_()
    step(x).sum().backward()
    return take_noted()


def test_a_compiled_block_notes_what_an_eager_one_does() -> None:
    """One graph, no break; the same weights in the same order with the same factors."""
    chain = _Chain()
    eager = notes_of(chain)
    compiled = notes_of(torch.compile(chain, fullgraph=True, backend="aot_eager"))
    assert [note.weight for note in compiled] == [note.weight for note in eager]
    assert [note.weight for note in eager] == [weight.data_ptr() for weight in reversed(chain.weights)]
    for a, b in zip(eager, compiled, strict=True):
        assert torch.equal(a.x, b.x) and torch.equal(a.dy, b.dy)
