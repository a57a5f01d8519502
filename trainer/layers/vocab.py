"""Vocabulary-parallel embedding and cross-entropy: rows of the [V, D] matrix are cut over tp, padded inside.

Padding rows (canonical row ≥ V) are never looked up, never multiplied and get no gradient: logits are taken from the
valid rows of the local matrix only. Full logits [N, V] never exist: tokens go through in chunks, and each chunk's
gradient is made right after its loss, while its logits are still there (no recomputation).

N tokens · D hidden · V local vocabulary rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from trainer.comm import Group, all_reduce, all_reduce_max
from trainer.data.batch import IGNORE_LABEL
from trainer.device import statistics_dtype
from trainer.layers.collectives import copy_to_tp, gather_to_tp, reduce_from_tp, scatter_from_tp
from trainer.layers.wide import wide_mm

# Logits alive at once, in elements: small enough for a CPU's cache hierarchy, large enough for an accelerator's GEMM.
CHUNK_NUMEL = {"cpu": 1 << 22}
CHUNK_NUMEL_ACCELERATOR = 1 << 27


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What is minimised, per valid label: cross-entropy with smoothed labels + z_loss · (log Σ exp logits)².

    `label_smoothing` ε gives every word ε/V of the target (arXiv 1512.00567); `z_loss` keeps the softmax' normaliser
    near 1 (arXiv 2204.02311). The loss that is reported is the cross-entropy of the labels as they are: it compares
    between runs with and without these, and with held-out losses.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0


CROSS_ENTROPY = Objective()


class VocabRange:
    """Which canonical rows a tp rank holds: `rows` local rows, of which the first `valid` are real."""

    def __init__(self, vocab_size: int, tp: Group) -> None:
        self.size = vocab_size
        self.rows = -(-vocab_size // tp.size)
        self.start = tp.rank * self.rows
        self.valid = max(0, min(self.rows, vocab_size - self.start))

    def localize(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(row to read, whether the id is here); ids elsewhere read row 0 and must be masked."""
        local = ids - self.start
        here = (local >= 0) & (local < self.valid)
        return torch.where(here, local, 0), here


class VocabParallelEmbedding(nn.Module):
    """ids [B, T] → hidden [B, T, D], equal on all tp ranks. Comm: 1 all-reduce (tp).

    With `sequence_parallel` [B, T / tp, D], other tokens on each rank. Comm: 1 reduce-scatter (tp).
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, *, tp: Group, dtype: torch.dtype, sequence_parallel: bool = False
    ) -> None:
        super().__init__()
        self.tp, self.range = tp, VocabRange(vocab_size, tp)
        self.leave = scatter_from_tp if sequence_parallel else reduce_from_tp
        self.weight = nn.Parameter(torch.empty(self.range.rows, hidden_size, dtype=dtype, device="meta"))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return F.embedding(input_ids, self.weight)
        rows, here = self.range.localize(input_ids)
        return self.leave(F.embedding(rows, self.weight) * here.unsqueeze(-1), self.tp)


class VocabParallelHead(nn.Module):
    """Final projection and loss: hidden [B, T, D], labels [B, T] → Σ cross-entropy over valid labels / num_valid.

    With `sequence_parallel` hidden is [B, T / tp, D]; labels are whole either way. The gradient is `objective`'s.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, *, tp: Group, dtype: torch.dtype, sequence_parallel: bool = False,
        objective: Objective = CROSS_ENTROPY,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tp, self.range, self.objective = tp, VocabRange(vocab_size, tp), objective
        self.enter = gather_to_tp if sequence_parallel else copy_to_tp
        self.weight = nn.Parameter(torch.empty(self.range.rows, hidden_size, dtype=dtype, device="meta"))

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor, num_valid: float) -> torch.Tensor:
        hidden_ND = self.enter(hidden, self.tp).flatten(0, 1)
        return vocab_parallel_cross_entropy(
            hidden_ND, self.weight, labels.flatten(), vocab=self.range, num_valid=num_valid, tp=self.tp,
            objective=self.objective,
        )  # fmt: skip


def vocab_parallel_cross_entropy(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_N: torch.Tensor,
    *,
    vocab: VocabRange,
    num_valid: float,
    tp: Group,
    chunk_numel: int | None = None,
    objective: Objective = CROSS_ENTROPY,
) -> torch.Tensor:
    """Σ over labels ≠ −100 of −log softmax(h Wᵀ)[label], divided by `num_valid`; a scalar in at least fp32.

    Its gradient is that of `objective` divided by `num_valid`, which is the same where neither of its terms is set.
    `num_valid` is the whole step's number of valid labels over all micro-batches and dp ranks, counted before backward.
    Comm: per chunk 1 max and 1 sum all-reduce (tp), of 3 values per token. The hidden gradient is this rank's part.
    """
    if chunk_numel is None:
        chunk_numel = CHUNK_NUMEL.get(hidden_ND.device.type, CHUNK_NUMEL_ACCELERATOR)
    chunk = max(1, chunk_numel // max(1, vocab.rows))
    need_grad = torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad)
    args = (hidden_ND, weight_VD, labels_N, vocab, num_valid, tp, chunk, need_grad, objective)
    loss: torch.Tensor = _CrossEntropy.apply(*args)  # type: ignore[no-untyped-call]
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: torch.Tensor, weight_VD: torch.Tensor, labels_N: torch.Tensor, vocab: VocabRange,
        num_valid: float, tp: Group, chunk: int, need_grad: bool, objective: Objective,
    ) -> torch.Tensor:  # fmt: skip
        stats = statistics_dtype(hidden_ND.dtype)
        loss = torch.zeros((), dtype=stats, device=hidden_ND.device)
        grad_hidden = torch.empty_like(hidden_ND) if need_grad else None
        grad_weight = _WeightGrad(weight_VD, vocab.valid, stats) if need_grad else None
        used_VD = weight_VD[: vocab.valid]
        for start in range(0, hidden_ND.shape[0], chunk):
            rows = slice(start, start + chunk)
            h_ND, labels = hidden_ND[rows], labels_N[rows]
            logits_NV = (h_ND @ used_VD.T).to(stats)
            losses, factor, target, here = _losses(logits_NV, labels, vocab, num_valid, tp, objective.z_loss)
            loss += losses.sum()
            if grad_hidden is not None and grad_weight is not None:
                smoothing = objective.label_smoothing
                logits_NV *= factor.unsqueeze(1)
                if smoothing:
                    every = (labels != IGNORE_LABEL).to(stats) * (smoothing / (vocab.size * num_valid))
                    logits_NV -= every.unsqueeze(1)
                if vocab.valid:
                    pull = here.to(stats) * ((smoothing - 1.0) / num_valid)  # torch.where of two numbers would be fp32
                    logits_NV.scatter_add_(1, target.unsqueeze(1), pull.unsqueeze(1))
                g_NV = logits_NV.to(hidden_ND.dtype)
                torch.mm(g_NV, used_VD, out=grad_hidden[rows])
                grad_weight.add(g_NV, h_ND)
                del g_NV
            del logits_NV  # or it would live until the next chunk's are made
        if grad_hidden is not None and grad_weight is not None:
            ctx.save_for_backward(grad_hidden, grad_weight.value)
        return loss / num_valid

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # In place: these are as large as the weight, and autograd refuses a second backward by their version.
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grads[0]
        return grad_hidden.mul_(scale), grad_weight.mul_(scale), *(None,) * 7


class _WeightGrad:
    """Σ over chunks of gᵀ h in the statistics dtype; the first chunk writes, later ones add."""

    def __init__(self, weight_VD: torch.Tensor, valid: int, dtype: torch.dtype) -> None:
        self.value = torch.empty(weight_VD.shape, dtype=dtype, device=weight_VD.device)
        self.value[valid:].zero_()
        self.used = self.value[:valid]
        self.empty = True

    def add(self, g_NV: torch.Tensor, h_ND: torch.Tensor) -> None:
        if g_NV.dtype != self.used.dtype:
            product = wide_mm(g_NV.T, h_ND, self.used.dtype)
            self.used.copy_(product) if self.empty else self.used.add_(product)
        elif self.empty:
            torch.mm(g_NV.T, h_ND, out=self.used)
        else:
            self.used.addmm_(g_NV.T, h_ND)
        self.empty = False


def _losses(
    logits_NV: torch.Tensor, labels_N: torch.Tensor, vocab: VocabRange, num_valid: float, tp: Group, z_loss: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per-token losses; logits become exp(logit − max) in place.

    Returns (losses [N], factor [N] that turns the exponentials into (1 + 2 z_loss · log Z) softmax / num_valid (0 for
    ignored labels), local target row [N], whether the target is on this rank [N]).
    """
    peak = logits_NV.amax(dim=1) if vocab.valid else logits_NV.new_full((logits_NV.shape[0],), float("-inf"))
    peak = all_reduce_max(peak, tp)
    logits_NV -= peak.unsqueeze(1)
    target, here = vocab.localize(labels_N)
    picked = logits_NV.gather(1, target.unsqueeze(1)).squeeze(1) * here if vocab.valid else torch.zeros_like(peak)
    logits_NV.exp_()
    sums = all_reduce(torch.stack((logits_NV.sum(dim=1), picked)), tp)
    counted = labels_N != IGNORE_LABEL
    log_sums = sums[0].log()
    losses = torch.where(counted, log_sums - sums[1], 0.0)
    push = 1.0 + 2.0 * z_loss * (log_sums + peak) if z_loss else 1.0
    factor = torch.where(counted, push / (sums[0] * num_valid), 0.0)
    return losses, factor, target, here
