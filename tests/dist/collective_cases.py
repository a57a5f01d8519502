"""Functions run on the pool's ranks by test_collectives.py; each returns plain numbers or numpy arrays."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from dist.pool import Ranks
from torch import nn

from trainer.comm import Counter, Group, all_reduce_in_order, reduce_scatter, solo
from trainer.layers.collectives import copy_to_tp, gather_to_tp, reduce_from_tp, scatter_from_tp
from trainer.layers.deferred import deferred_linear
from trainer.layers.linear import ColumnParallelLinear, RowParallelLinear
from trainer.layers.vocab import (
    CROSS_ENTROPY,
    Objective,
    VocabParallelEmbedding,
    VocabRange,
    vocab_parallel_cross_entropy,
)
from trainer.mesh.context import ParallelContext
from trainer.mesh.topology import Topology
from trainer.pipeline.block import PipelineBlock, TensorPointer
from trainer.pipeline.engine.interpreter import Interpreter
from trainer.pipeline.generators import make_schedule
from trainer.pipeline.trace import trace
from trainer.pipeline.validate import validate


def world(ranks: Ranks, size: int) -> Group:
    members = tuple(range(size))
    return Group(ranks=members, rank=ranks.rank, pg=ranks.group(members), counter=Counter())


def set_weight(module: nn.Module, name: str, value: torch.Tensor) -> torch.Tensor:
    parameter = nn.Parameter(value.clone())
    setattr(module, name, parameter)
    return parameter


def linear_pair(ranks: Ranks, size: int) -> list[np.ndarray]:
    """column → row with bias: [y, gradients of x, my part of both weights, the bias] as this rank sees them."""
    tp = world(ranks, size)
    g = torch.Generator().manual_seed(1)
    x, w1, w2, b = (torch.randn(s, generator=g, dtype=torch.float64) for s in ((3, 4), (8, 4), (5, 8), (5,)))
    x.requires_grad_()
    column = ColumnParallelLinear(4, 8, tp=tp, dtype=torch.float64)
    row = RowParallelLinear(8, 5, tp=tp, dtype=torch.float64, bias=True)
    cut = slice(tp.rank * 8 // size, (tp.rank + 1) * 8 // size)
    c = set_weight(column, "weight", w1[cut])
    r, bias = set_weight(row, "weight", w2[:, cut]), set_weight(row, "bias", b)
    y = row(torch.tanh(column(x)))
    y.square().sum().backward()
    tensors = (y.detach(), x.grad, c.grad, r.grad, bias.grad)
    return [t.numpy().copy() for t in tensors if t is not None]


def numeric_dual(ranks: Ranks, size: int) -> tuple[float, float]:
    """⟨dy, J dx⟩ = ⟨Jᵀ dy, dx⟩ over the whole group for copy and reduce: both sides' difference."""
    tp = world(ranks, size)
    errors = []
    for function, is_copy in ((copy_to_tp, True), (reduce_from_tp, False)):
        shared, own = (torch.Generator().manual_seed(s) for s in (5, 6 + tp.rank))
        x = torch.randn(7, generator=shared if is_copy else own, dtype=torch.float64).requires_grad_()
        y = function(x * 1, tp)
        dy = torch.randn(7, generator=own if is_copy else shared, dtype=torch.float64)
        (grad,) = torch.autograd.grad(y, x, dy)
        left, right = torch.dot(dy, y.detach()), torch.dot(grad, x.detach())
        both = torch.stack((left, right))
        if is_copy:  # outputs differ per rank, the input is one
            torch.distributed.all_reduce(both[:1], group=tp.pg)
        else:  # inputs differ per rank, the output is one
            torch.distributed.all_reduce(both[1:], group=tp.pg)
        errors.append(float((both[0] - both[1]).abs()))
    return errors[0], errors[1]


def sequence_pair(ranks: Ranks, size: int) -> list[np.ndarray]:
    """gather → column → row with bias → scatter: [my part of y and of x's gradient, my part of both weights', the
    bias' partial gradient]. x [2, T, 4] with T = 2 · size."""
    tp = world(ranks, size)
    x, w1, w2, b = (t.detach() for t in sequence_tensors(size))
    mine = x[:, tp.rank * 2 : tp.rank * 2 + 2].clone().requires_grad_()
    column = ColumnParallelLinear(4, 8, tp=tp, dtype=torch.float64, input_is_shared=True)
    row = RowParallelLinear(8, 5, tp=tp, dtype=torch.float64, bias=True, sequence_parallel=True)
    cut = slice(tp.rank * 8 // size, (tp.rank + 1) * 8 // size)
    c = set_weight(column, "weight", w1[cut])
    r, bias = set_weight(row, "weight", w2[:, cut]), set_weight(row, "bias", b)
    y = row(torch.tanh(column(gather_to_tp(mine, tp))))
    y.square().sum().backward()
    tensors = (y.detach(), mine.grad, c.grad, r.grad, bias.grad)
    return [t.numpy().copy() for t in tensors if t is not None]


def sequence_tensors(size: int) -> list[torch.Tensor]:
    """x, both weights, the bias."""
    g = torch.Generator().manual_seed(1)
    shapes = ((2, 2 * size, 4), (8, 4), (5, 8), (5,))
    return [torch.randn(s, generator=g, dtype=torch.float64).requires_grad_() for s in shapes]


def jacobians(ranks: Ranks, size: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(J, K): this rank's output for a 1 at each input element of each rank, its gradient for a 1 at each output's."""
    tp = world(ranks, size)
    function, cut = (gather_to_tp, 2) if name == "gather" else (scatter_from_tp, 2 * size)
    x = torch.zeros(2, cut, 3, dtype=torch.float64)
    y = function(x, tp)

    def basis(like: torch.Tensor) -> list[torch.Tensor]:
        ones = torch.eye(like.numel(), dtype=torch.float64).view(-1, *like.shape)
        return [one * (rank == tp.rank) for rank in range(size) for one in ones]

    forward = [function(one, tp).flatten() for one in basis(x)]
    x.requires_grad_()
    backward = [torch.autograd.grad(function(x, tp), x, one)[0].flatten() for one in basis(y)]
    return torch.stack(forward).numpy(), torch.stack(backward).numpy()


def odd_sequence(ranks: Ranks, size: int) -> None:
    scatter_from_tp(torch.zeros(1, 2 * size - 1, 3), world(ranks, size))


def scattered_from(ranks: Ranks, size: int, batch: int) -> bool:
    """Whether scatter leaves its input, and gather's backward its gradient, as they were."""
    tp = world(ranks, size)
    x, dy = (torch.randn(batch, 2 * size, 3, generator=torch.Generator().manual_seed(s)) for s in (3, 4))
    before = x.clone(), dy.clone()
    scatter_from_tp(x, tp)
    part = torch.zeros(batch, 2, 3, requires_grad=True)
    gather_to_tp(part, tp).backward(dy)
    return torch.equal(x, before[0]) and torch.equal(dy, before[1])


def ordered_sums(ranks: Ranks, size: int, sizes: tuple[int, ...]) -> np.ndarray:
    """Sum a fixed vector in messages of tensors of `sizes`; the whole."""
    group = world(ranks, size)
    whole = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(30 + group.rank))
    all_reduce_in_order(list(whole.split(list(sizes))), group)
    return whole.numpy()


def sharded_vocabulary(ranks: Ranks, size: int, vocab: int, objective: Objective = CROSS_ENTROPY) -> list[np.ndarray]:
    """[loss, hidden gradient, my valid weight gradient rows, embedding output, its weight gradient rows]."""
    tp = world(ranks, size)
    g = torch.Generator().manual_seed(2)
    hidden = torch.randn(11, 6, generator=g, dtype=torch.float64).requires_grad_()
    whole = torch.randn(vocab, 6, generator=g, dtype=torch.float64)
    labels = torch.randint(0, vocab, (11,), generator=g)
    labels[::4] = -100
    part = VocabRange(vocab, tp)
    weight = torch.full((part.rows, 6), 50.0, dtype=torch.float64)  # padding rows would win every softmax
    weight[: part.valid] = whole[part.start : part.start + part.valid]
    weight.requires_grad_()
    before = hidden.detach().clone(), weight.detach().clone(), labels.clone()
    loss = vocab_parallel_cross_entropy(
        copy_to_tp(hidden, tp), weight, labels, vocab=part, num_valid=9, tp=tp, chunk_numel=3 * part.rows,
        objective=objective,
    )  # fmt: skip
    loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(before, (hidden, weight, labels), strict=True)), "inputs are read only"
    embedding = VocabParallelEmbedding(vocab, 6, tp=tp, dtype=torch.float64)
    table = set_weight(embedding, "weight", weight.detach())
    out = embedding(labels.clamp(min=0).view(1, -1))
    out.square().sum().backward()
    rows = slice(0, part.valid)
    tensors = (loss.detach(), hidden.grad, weight.grad, out.detach(), table.grad)
    assert all(t is not None for t in tensors)
    assert not weight.grad[part.valid :].any() and not table.grad[part.valid :].any()  # type: ignore[index]
    return [t[rows].numpy().copy() if t is weight.grad or t is table.grad else t.numpy().copy() for t in tensors]


def plain_vocabulary(vocab: int, objective: Objective = CROSS_ENTROPY) -> list[np.ndarray]:
    """What `sharded_vocabulary` must give, on whole tensors: the loss is the cross-entropy, the gradients the
    objective's."""
    g = torch.Generator().manual_seed(2)
    hidden = torch.randn(11, 6, generator=g, dtype=torch.float64).requires_grad_()
    whole = torch.randn(vocab, 6, generator=g, dtype=torch.float64).requires_grad_()
    labels = torch.randint(0, vocab, (11,), generator=g)
    labels[::4] = -100
    logits = hidden @ whole.T
    loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / 9
    smooth = F.cross_entropy(
        logits, labels, ignore_index=-100, reduction="sum", label_smoothing=objective.label_smoothing
    )
    squares = logits.logsumexp(dim=1).square()[labels != -100].sum()
    ((smooth + objective.z_loss * squares) / 9).backward()
    table = whole.detach().clone().requires_grad_()
    out = F.embedding(labels.clamp(min=0).view(1, -1), table)
    out.square().sum().backward()
    return [t.detach().numpy() for t in (loss, hidden.grad, whole.grad, out, table.grad)]  # type: ignore[union-attr]


def scattered(ranks: Ranks, size: int, sizes: tuple[int, ...]) -> np.ndarray:
    """Reduce-scatter a fixed vector in buckets of `sizes` (per rank); this rank's parts, concatenated."""
    group = world(ranks, size)
    g = torch.Generator().manual_seed(30 + group.rank)
    whole = torch.randn(size, sum(sizes), generator=g)
    parts, start = [], 0
    for n in sizes:
        parts.append(reduce_scatter(whole[:, start : start + n].reshape(-1).contiguous(), group).clone())
        start += n
    return torch.cat(parts).numpy()


class _Source(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, dtype=torch.float64)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = self.table(ids)
        return x, x.cos(), ids + 1


class _Middle(nn.Module):
    """Its weight's gradient waits for W, its bias' does not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = RowParallelLinear(4, 4, tp=solo(), dtype=torch.float64, bias=True, linear=deferred_linear)
        set_weight(self.linear, "weight", torch.randn(4, 4, dtype=torch.float64))
        set_weight(self.linear, "bias", torch.randn(4, dtype=torch.float64))
        self.linear.weight.grad = torch.zeros(4, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class _Sink(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, x: torch.Tensor, skip: torch.Tensor, other: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return (self.linear(x * skip) * ids.unsqueeze(-1)).sum() + (skip * other).sum()


class Skipping(nn.Module):
    """Four stages; two tensors skip the middle two, one of them also feeds the next; an integer tensor travels."""

    def __init__(self, stages: tuple[int, int, int, int]) -> None:
        super().__init__()
        self.source = PipelineBlock(_Source, name="source", stage=stages[0])
        self.first = PipelineBlock(_Middle, name="first", stage=stages[1])
        self.second = PipelineBlock(_Middle, name="second", stage=stages[2])
        self.sink = PipelineBlock(_Sink, name="sink", stage=stages[3])

    def forward(self, *, ids: TensorPointer) -> TensorPointer:
        x, skip, shifted = self.source(ids=ids)
        out: TensorPointer = self.sink(x=self.second(x=self.first(x=x)), skip=skip, other=x, ids=shifted)
        return out


def skip_pipeline(ranks: Ranks, pp: int, name: str) -> tuple[float, dict[str, np.ndarray]]:
    """(Σ loss, gradients by name) of `Skipping` on this rank after 4 micro-batches; one stage if pp = 1."""
    ctx = ParallelContext(Topology(pp=pp), rank=ranks.rank, device=torch.device("cpu"), group_factory=ranks.group)
    made = make_schedule(name, p=pp, m=4)
    model = Skipping((0, 1, 2, 3) if made.placement.num_stages == 4 else (0, 0, 0, 0))
    graph = trace(model, {"ids": torch.zeros(2, 3, dtype=torch.int64, device="meta")})
    modules: dict[str, Any] = {}
    for seed, block in enumerate((model.source, model.first, model.second, model.sink)):
        torch.manual_seed(seed)
        module = block.builder()
        if made.placement.ranks[block.stage] == ctx.get_pp_rank():
            modules[block.name] = module
    generator = torch.Generator().manual_seed(9)
    fields = [{"ids": torch.randint(0, 7, (2, 3), generator=generator)} for _ in range(4)]
    interpreter = Interpreter(graph, modules, placement=made.placement, pp=ctx.pp, device=torch.device("cpu"))
    loss = interpreter.run(validate(made, graph.links).lists[ctx.get_pp_rank()], fields, is_training=True)
    named = {f"{block}.{n}": p for block, module in modules.items() for n, p in module.named_parameters()}
    return float(loss), {n: p.grad.numpy().copy() for n, p in named.items() if p.grad is not None}
