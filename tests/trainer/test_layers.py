"""Layers in one process against torch: sharded cross-entropy, rotary, chunks, and what tracing refuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from engine_world import tiny_config
from torch import nn

from trainer.comm import Group, solo
from trainer.config.rope import RopeParameters
from trainer.layers.factory import LayerFactory
from trainer.layers.linear import ColumnParallelLinear, RowParallelLinear
from trainer.layers.rotary import Rotary, rotate
from trainer.layers.vocab import VocabRange, vocab_parallel_cross_entropy
from trainer.mesh.topology import Topology
from trainer.models.llama import Llama
from trainer.pipeline.block import PipelineBlock, PointerError, TensorPointer
from trainer.pipeline.graph import FieldRef, ValueRef
from trainer.pipeline.trace import trace

N, D, V = 23, 8, 31


def hidden_weight_labels(padding: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(N, D, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(V + padding, D, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.randint(0, V, (N,), generator=generator)
    labels[::3] = -100
    return hidden, weight, labels


@pytest.mark.parametrize("chunk_numel", [1, 5 * V, 1 << 20])
def test_cross_entropy_equals_torch_for_every_chunk_size(chunk_numel: int) -> None:
    """T5."""
    hidden, weight, labels = hidden_weight_labels()
    loss = vocab_parallel_cross_entropy(
        hidden, weight, labels, vocab=VocabRange(V, solo()), num_valid=40, tp=solo(), chunk_numel=chunk_numel
    )
    (3 * loss).backward()
    h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    reference = F.cross_entropy(h @ w.T, labels, ignore_index=-100, reduction="sum") / 40
    (3 * reference).backward()
    torch.testing.assert_close(loss, reference, rtol=1e-13, atol=0)
    torch.testing.assert_close(hidden.grad, h.grad, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(weight.grad, w.grad, rtol=1e-12, atol=1e-15)


def test_padding_rows_never_win_and_get_no_gradient() -> None:
    """T6: A padded row aligned with the hidden state would dominate the softmax if it took part."""
    hidden, weight, labels = hidden_weight_labels(padding=2)
    with torch.no_grad():
        weight[V:] = 1e3
    vocab = VocabRange(V, solo())
    vocab.rows, vocab.valid = V + 2, V
    loss = vocab_parallel_cross_entropy(hidden, weight, labels, vocab=vocab, num_valid=10, tp=solo())
    loss.backward()
    reference = F.cross_entropy(hidden @ weight[:V].T, labels, ignore_index=-100, reduction="sum") / 10
    torch.testing.assert_close(loss, reference)
    assert weight.grad is not None and torch.equal(weight.grad[V:], torch.zeros(2, D, dtype=torch.float64))


def test_all_labels_ignored_gives_zero_loss_and_finite_gradients() -> None:
    """L7."""
    hidden, weight, labels = hidden_weight_labels()
    loss = vocab_parallel_cross_entropy(
        hidden, weight, torch.full_like(labels, -100), vocab=VocabRange(V, solo()), num_valid=5, tp=solo()
    )
    loss.backward()
    assert loss.item() == 0.0 and hidden.grad is not None and not hidden.grad.any() and not weight.grad.any()


def test_huge_logits_stay_finite() -> None:
    hidden, weight, labels = hidden_weight_labels()
    loss = vocab_parallel_cross_entropy(
        hidden * 1e4, weight, labels, vocab=VocabRange(V, solo()), num_valid=5, tp=solo()
    )
    reference = F.cross_entropy(1e4 * hidden @ weight.T, labels, ignore_index=-100, reduction="sum") / 5
    torch.testing.assert_close(loss, reference)


def test_a_second_backward_is_refused_because_the_first_used_up_the_gradients() -> None:
    hidden, weight, labels = hidden_weight_labels()
    loss = vocab_parallel_cross_entropy(hidden, weight, labels, vocab=VocabRange(V, solo()), num_valid=3, tp=solo())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_rotary_is_half_split_and_its_backward_is_exact() -> None:
    rotary = Rotary(head_dim=8, rope=RopeParameters(rope_theta=100.0), max_positions=16, dtype=torch.float64)
    positions = torch.tensor([[0, 3, 15]])
    cos, sin = rotary(positions)
    x = torch.randn(1, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    half = torch.cat((-x[..., 4:], x[..., :4]), -1)
    expected = x * torch.cat((cos, cos), -1) + half * torch.cat((sin, sin), -1)
    torch.testing.assert_close(rotate(x, cos, sin), expected)
    torch.testing.assert_close(rotate(x, cos, sin)[:, 0], x[:, 0])
    assert torch.autograd.gradcheck(lambda y: rotate(y, cos, sin), (x,))
    with pytest.raises(IndexError):
        rotary(torch.tensor([[16]]))


def test_features_that_tp_does_not_divide_are_refused() -> None:
    three = Group(ranks=(0, 1, 2), rank=0, pg=None)
    for layer in (ColumnParallelLinear, RowParallelLinear):
        with pytest.raises(ValueError, match="not divisible by tp = 3"):
            layer(4, 4, tp=three, dtype=torch.float32)


class _Toy(nn.Module):
    """Two blocks with a caller-given computation between them."""

    def __init__(self, between, second_stage: int = 1) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.between = between
        self.first = PipelineBlock(lambda: nn.Embedding(7, 4), name="first", stage=0)
        self.second = PipelineBlock(_Mean, name="second", stage=second_stage)

    def forward(self, *, ids: TensorPointer) -> TensorPointer:
        out: TensorPointer = self.second(x=self.between(self.first(input=ids)))
        return out


class _Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean()


FIELDS = {"ids": torch.zeros(2, 3, dtype=torch.int64, device="meta")}


@pytest.mark.parametrize(
    "between",
    [lambda x: x * 2, lambda x: 2 + x, torch.relu, lambda x: x.float(), lambda x: x[0], bool, len],
    ids=["mul", "radd", "torch", "method", "index", "bool", "len"],
)
@pytest.mark.parametrize("second_stage", [0, 1])
def test_a_computation_between_blocks_is_refused_with_line_and_remedy(between, second_stage: int) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PointerError, match=r"test_layers.py:\d+: .*outside any block.*Move the computation") as caught:
        trace(_Toy(between, second_stage), FIELDS)
    assert "PipelineBlock" in str(caught.value)


def test_a_pointer_has_a_shape_and_blocks_refuse_plain_tensors() -> None:
    shapes = []
    trace(_Toy(lambda x: (shapes.append(x.shape), x)[1]), FIELDS)
    assert shapes == [(2, 3, 4)]
    with pytest.raises(PointerError, match=r"got Tensor for 'x'|without any TensorPointer"):
        trace(_Toy(lambda x: torch.zeros(1)), FIELDS)


def test_an_edge_to_an_earlier_stage_is_refused() -> None:
    toy = _Toy(lambda x: x)
    toy.first.stage, toy.second.stage = 1, 0
    with pytest.raises(PointerError, match="on the later stage 1"):
        trace(toy, FIELDS)


def test_llama_graph_crosses_stages_with_the_hidden_state_alone() -> None:
    config = tiny_config(pp=2, layers=4)
    model = Llama(config, LayerFactory(tp=solo(), dtype=torch.float32), Topology(pp=2))
    ids = torch.zeros(2, 16, dtype=torch.int64, device="meta")
    graph = trace(model, {"input_ids": ids, "labels": ids, "position_ids": ids, "num_valid": 1.0})
    assert graph.links == ((0, 1),) and len(graph.edges[0, 1]) == 1 and graph.loss_stage == 1
    assert graph.meta(graph.edges[0, 1][0]).shape == (2, 16, 32)
    labels = [node.stage for node in graph.nodes for _, ref in node.inputs if ref == FieldRef("labels")]
    assert labels == [1] and isinstance(graph.loss, ValueRef)
    assert all(block.module is None for block in model.modules() if isinstance(block, PipelineBlock))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_declared_output_shapes_are_those_torch_computes(
    dtype: torch.dtype, tied: bool, sequence_parallel: bool
) -> None:
    """Llama declares its shapes so that no rank pays for a meta operation at start; here torch computes them."""
    config = tiny_config(pp=2, tp=2, layers=4, tied=tied)
    ids = torch.zeros(2, 16, dtype=torch.int64, device="meta")
    fields = {"input_ids": ids, "labels": ids, "position_ids": ids, "num_valid": 1.0}
    layers = LayerFactory(tp=Group(ranks=(0, 1), rank=1, pg=None), dtype=dtype, sequence_parallel=sequence_parallel)
    model = Llama(config, layers, Topology(pp=2, tp=2))
    declared = trace(model, fields)
    for block in model.modules():
        if isinstance(block, PipelineBlock):
            assert block.outputs is not None
            block.outputs = None
    assert trace(model, fields) == declared
    assert declared.meta(declared.edges[0, 1][0]).shape == (2, 8 if sequence_parallel else 16, 32)


def test_starting_a_rank_runs_no_meta_operation() -> None:
    """The first meta operation imports sympy and torch's compiler: seconds of every restart."""
    code = (
        "import sys; from engine_world import solo_engine, tiny_batch, tiny_config;"
        "engine = solo_engine(tiny_config());"
        "engine.train_step(tiny_batch(), lr=1e-3, weight_decay=0.0, adam_t=1);"
        "print('sympy' in sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert out.stdout.strip() == "False"
