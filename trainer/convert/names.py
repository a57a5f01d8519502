"""Canonical names ↔ Hugging Face names, one table for both directions.

Inside pawl a tensor has the name, the shape and the row order that transformers gives it (rotary halves, nothing
fused), so a line differs only where another family would differ. A name that no line matches is an error: a tensor that
is silently left out is a model that talks nonsense.
"""

import re
from collections.abc import Iterator

LLAMA: tuple[tuple[str, str], ...] = (
    ("model.embed_tokens.weight", "model.embed_tokens.weight"),
    ("model.layers.{layer}.input_layernorm.weight", "model.layers.{layer}.input_layernorm.weight"),
    ("model.layers.{layer}.self_attn.q_proj.weight", "model.layers.{layer}.self_attn.q_proj.weight"),
    ("model.layers.{layer}.self_attn.k_proj.weight", "model.layers.{layer}.self_attn.k_proj.weight"),
    ("model.layers.{layer}.self_attn.v_proj.weight", "model.layers.{layer}.self_attn.v_proj.weight"),
    ("model.layers.{layer}.self_attn.o_proj.weight", "model.layers.{layer}.self_attn.o_proj.weight"),
    ("model.layers.{layer}.post_attention_layernorm.weight", "model.layers.{layer}.post_attention_layernorm.weight"),
    ("model.layers.{layer}.mlp.gate_proj.weight", "model.layers.{layer}.mlp.gate_proj.weight"),
    ("model.layers.{layer}.mlp.up_proj.weight", "model.layers.{layer}.mlp.up_proj.weight"),
    ("model.layers.{layer}.mlp.down_proj.weight", "model.layers.{layer}.mlp.down_proj.weight"),
    ("model.norm.weight", "model.norm.weight"),
    ("lm_head.weight", "lm_head.weight"),
)
"""(canonical, Hugging Face) for each kind of tensor that all families have."""


def _same(*names: str) -> tuple[tuple[str, str], ...]:
    """Tensors of a layer whose two names are one."""
    return tuple((f"model.layers.{{layer}}.{name}",) * 2 for name in names)


_QKV_BIAS = _same("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")
_ATTENTION_BIAS = (*_QKV_BIAS, *_same("self_attn.o_proj.bias"))
_MLP_BIAS = _same("mlp.gate_proj.bias", "mlp.up_proj.bias", "mlp.down_proj.bias")
_QK_NORM = _same("self_attn.q_norm.weight", "self_attn.k_norm.weight")
_LAYER_NORM = (*_same("input_layernorm.bias", "post_attention_layernorm.bias"), ("model.norm.bias",) * 2)
_TWO_MATRICES = _same("mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight", "mlp.c_proj.bias")
_GATED = frozenset(f"model.layers.{{layer}}.mlp.{x}_proj.weight" for x in ("gate", "up", "down"))

TABLES = {
    "llama": (*LLAMA, *_ATTENTION_BIAS, *_MLP_BIAS),
    "mistral": LLAMA,
    "qwen2": (*LLAMA, *_QKV_BIAS),
    "qwen3": (*LLAMA, *_ATTENTION_BIAS, *_QK_NORM),
    "smollm3": (*LLAMA, *_ATTENTION_BIAS, *_MLP_BIAS),
    "starcoder2": (
        *(line for line in LLAMA if line[0] not in _GATED), *_ATTENTION_BIAS, *_LAYER_NORM, *_TWO_MATRICES,
    ),
}  # fmt: skip
"""(canonical, Hugging Face) by model type, also of tensors that only some of its models have."""


def to_hf(name: str, model_type: str) -> str:
    """Hugging Face's name of a canonical tensor. KeyError for a tensor or family it does not know."""
    return _renamed(name, ((canonical, hf) for canonical, hf in TABLES[model_type]))


def from_hf(name: str, model_type: str) -> str:
    """The canonical name of a Hugging Face tensor. KeyError for a tensor or family it does not know."""
    return _renamed(name, ((hf, canonical) for canonical, hf in TABLES[model_type]))


def _renamed(name: str, table: Iterator[tuple[str, str]]) -> str:
    for pattern, target in table:
        match = re.fullmatch(re.escape(pattern).replace(r"\{layer\}", r"(?P<layer>\d+)"), name)
        if match is not None:
            return target.format(**match.groupdict())
    raise KeyError(name)
