"""The oracle: a transformers model in one process, the whole global batch at once, torch's AdamW.

transformers is not fp64 inside: RMSNorm and the rotary tables are taken in fp32. Both are lifted to the input's dtype
here where that is wider, and the loss is taken outside the model as Σ/n_valid, so that fp64 means fp64 and 1e-10 is a
fair bar. In bf16 the model is transformers' own, with an fp32 master that the optimizer updates.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


def at_least_fp32(x: torch.Tensor) -> torch.Tensor:
    """x in its own dtype, or in fp32 where that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class LiftedRMSNorm(nn.Module):
    """RMSNorm in the dtype of its input, at least in fp32."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = at_least_fp32(x)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class LiftedRotary(nn.Module):
    """Rotary tables in the dtype of the hidden states, their angles at least in fp32, by transformers' own formulas."""

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.frequencies, self.factor = _frequencies(config, torch.promote_types(dtype, torch.float32))

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].to(self.frequencies.dtype) * self.frequencies
        table = torch.cat((angles, angles), dim=-1)
        return (table.cos() * self.factor).to(x.dtype), (table.sin() * self.factor).to(x.dtype)


def _frequencies(config: PretrainedConfig, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    """Radians per position, and the factor on cosines and sines. Transformers asks for torch.float by name."""
    plain = LlamaRotaryEmbedding.compute_default_rope_parameters
    compute = ROPE_INIT_FUNCTIONS.get(config.rope_parameters["rope_type"], plain)
    with mock.patch.multiple(torch, float=dtype, float32=dtype):
        frequencies, factor = compute(config)
    assert frequencies.dtype == dtype
    return frequencies, factor


def build(config: PretrainedConfig, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> PreTrainedModel:
    """A transformers model holding exactly `tensors` (canonical names), fp32 casts lifted."""
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype)
    missing, unexpected = model.load_state_dict(dict(tensors), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    model.model.rotary_emb = LiftedRotary(config, dtype)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm") and not isinstance(child, LiftedRMSNorm):
                setattr(module, name, LiftedRMSNorm(child.weight, child.variance_epsilon))
    return model  # type: ignore[no-any-return]


LAST_END = 7


def document_positions(ids: torch.Tensor) -> torch.Tensor:
    """Places in the documents of ids [..., T], where each token up to LAST_END is the last of its document."""
    places = torch.arange(ids.shape[-1]).expand(ids.shape)
    starts = torch.zeros_like(ids)
    starts[..., 1:] = torch.where(ids[..., :-1] <= LAST_END, places[..., 1:], 0)
    return places - starts.cummax(dim=-1).values


def mask_documents(model: PreTrainedModel) -> None:
    """Let the model see documents as `document_positions` cuts them: positions and a mask of its own per sample."""

    def cut(module: nn.Module, args: object, kwargs: dict[str, torch.Tensor]) -> tuple[object, dict[str, torch.Tensor]]:
        ids = kwargs["input_ids"]
        document = torch.zeros_like(ids)
        document[:, 1:] = (ids[:, :-1] <= LAST_END).cumsum(dim=-1)
        seen = (document[:, :, None] == document[:, None, :]).tril()
        mask = torch.zeros(seen.shape, dtype=model.dtype).masked_fill(~seen, float("-inf")).unsqueeze(1)
        return args, {**kwargs, "position_ids": document_positions(ids), "attention_mask": mask}

    model.register_forward_pre_hook(cut, with_kwargs=True)


MUP_BASE_WIDTH = 256


def apply_mup(model: Any) -> None:
    """Spectral muP's two factors of the forward pass: scores times 1/d; before a tied head, hidden times base / D."""
    for layer in model.model.layers:
        layer.self_attn.scaling = 1 / layer.self_attn.head_dim
    if model.config.tie_word_embeddings:
        multiplier = MUP_BASE_WIDTH / model.config.hidden_size
        model.model.norm.register_forward_hook(lambda module, args, out: out * multiplier)


def mup_rates(model: nn.Module) -> dict[str, float]:
    """Spectral muP's factors on Adam's rate: base width / fan in for matrices, 1 for embeddings and norms."""
    return {
        name: MUP_BASE_WIDTH / weight.shape[1]
        for name, weight in model.named_parameters()
        if name.endswith(("proj.weight", "c_fc.weight", "lm_head.weight"))
    }


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a reference run computed: per step loss and gradient norm, step-1 gradients, final weights."""

    losses: list[float]
    grad_norms: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def train(
    model: nn.Module,
    batches: list[tuple[torch.Tensor, torch.Tensor]],
    *,
    lr: list[float],
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    clip_grad: float | None,
    lr_mult: Mapping[str, float],
    decay_mult: Mapping[str, float],
    z_loss: float,
    label_smoothing: float,
    masters: Mapping[str, nn.Parameter] | None = None,
) -> Outcome:
    """One AdamW step per batch (input_ids, labels, both [samples, T]; labels already shifted).

    lr_mult: factor on the rate of a parameter, 1 where it is not named; decay_mult: on its weight decay, else 1 for
    matrices and 0 for the rest. masters: what the optimizer updates, where that is not the model's own parameters;
    those are rounded from it. The losses returned are the cross-entropy alone.
    """
    live = dict(model.named_parameters())
    named = dict(masters) if masters is not None else live
    groups = [
        {
            "params": [p],
            "weight_decay": weight_decay * decay_mult.get(name, float(p.dim() > 1)),
            "mult": lr_mult.get(name, 1.0),
        }
        for name, p in named.items()
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr[0], betas=betas, eps=eps, foreach=False)
    losses, norms, gradients = [], [], {}
    for step, (ids, labels) in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = lr[step] * group["mult"]
        model.zero_grad()
        valid = int((labels != -100).sum())
        logits = at_least_fp32(model(input_ids=ids).logits)
        loss = cross_entropy_sum(logits, labels) / valid
        smooth = cross_entropy_sum(logits, labels, label_smoothing=label_smoothing)
        squares = (logits.logsumexp(dim=-1).square() * (labels != -100)).sum()
        ((smooth + z_loss * squares) / valid).backward()
        if masters is not None:
            for name, p in live.items():
                masters[name].grad = None if p.grad is None else p.grad.to(masters[name].dtype)
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        norms.append(float(nn.utils.clip_grad_norm_(named.values(), float("inf") if clip_grad is None else clip_grad)))
        losses.append(float(loss.detach()))
        optimizer.step()
        if masters is not None:
            for name, p in live.items():
                p.data.copy_(masters[name].data)
    weights = {name: p.detach().clone() for name, p in named.items()}
    return Outcome(losses=losses, grad_norms=norms, gradients=gradients, weights=weights)


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    """Σ over the labels that are not ignored."""
    args = (logits.flatten(0, 1), labels.flatten())
    return F.cross_entropy(*args, ignore_index=-100, reduction="sum", label_smoothing=label_smoothing)
