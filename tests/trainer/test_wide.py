"""Weight gradients of bfloat16 layers: their sums are rounded to the gradient's dtype, float32, and never before."""

import pytest
import torch
from torch import nn

from trainer.comm import solo
from trainer.layers.deferred import WeightGradient, add_weight_gradient
from trainer.layers.vocab import VocabRange, vocab_parallel_cross_entropy
from trainer.layers.wide import wide_mm


def narrow(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_a_wide_product_is_that_of_the_narrow_factors() -> None:
    a, b = narrow(40, 70, seed=1), narrow(70, 30, seed=2)
    exact = a.double() @ b.double()
    assert torch.linalg.vector_norm(wide_mm(a, b, torch.float32) - exact) < 1e-6 * torch.linalg.vector_norm(exact)
    assert torch.linalg.vector_norm((a @ b) - exact) > 1e-4 * torch.linalg.vector_norm(exact), "what is avoided"


def test_a_linear_layer_adds_its_gradient_unrounded() -> None:
    weight = nn.Parameter(narrow(6, 5, seed=0))
    weight.grad_dtype = torch.float32
    weight.grad = torch.zeros(6, 5)
    x, dy = narrow(3, 7, 5, seed=1), narrow(3, 7, 6, seed=2)
    add_weight_gradient(weight, WeightGradient(weight.data_ptr(), x, dy))
    exact = dy.flatten(0, 1).double().T @ x.flatten(0, 1).double()
    torch.testing.assert_close(weight.grad.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk_numel", [None, 11])
def test_the_head_adds_its_gradient_unrounded(chunk_numel: int | None) -> None:
    """Of one token the gradient is a product of two bfloat16 numbers: exact in float32, rounded in bfloat16."""
    weight = nn.Parameter(narrow(11, 8, seed=0))
    weight.grad_dtype = torch.float32
    weight.grad = torch.zeros(11, 8)
    hidden = narrow(1, 8, seed=1).requires_grad_()
    loss = vocab_parallel_cross_entropy(
        hidden, weight, torch.tensor([3]), vocab=VocabRange(11, solo()), num_valid=1.0, tp=solo(),
        chunk_numel=chunk_numel,
    )  # fmt: skip
    loss.backward()
    assert (weight.grad != weight.grad.bfloat16().float()).float().mean() > 0.5
