"""The model families, one row each: what differs between them besides numbers. No torch.

    residual stream ─▶ norm ─▶ attention (biases, head norms, layers without rotary positions) ─▶ +
                    ─▶ norm ─▶ feed-forward (gated, or two matrices; biases)                   ─▶ +

The config's classes, the ParamSpec table, the model code, the estimates and the conversion read this table; a family
that fits into its columns is one row, and one value of the oracle's axis `family`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType


class Norm(StrEnum):
    """RMSNorm (a weight), LayerNorm (a weight and a bias)."""

    RMS = "rms"
    LAYER = "layer"


_NOTHING: Mapping[str, object] = MappingProxyType({})
_WINDOW = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family in transformers' words.

    `architecture`: its class in transformers. `keys`: what its config has and not every family's has. `norm_eps`: the
    key of the norms' epsilon. `is_gated`: the feed-forward is down(act(gate x) · up x), else c_proj(act(c_fc x)).
    `qkv_bias`, `out_bias`, `mlp_bias`: whether these have biases, or the key that says so. `has_head_dim`: whether the
    head size may be another than hidden_size / num_attention_heads. `defaults`: of keys where they are its own.
    """

    architecture: str
    keys: frozenset[str]
    norm: Norm = Norm.RMS
    norm_eps: str = "rms_norm_eps"
    is_gated: bool = True
    has_qk_norm: bool = False
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    has_head_dim: bool = True
    defaults: Mapping[str, object] = field(default_factory=lambda: _NOTHING)


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(
            architecture="LlamaForCausalLM", keys=frozenset({"rms_norm_eps", "attention_bias", "mlp_bias"}),
            qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias",
        ),
        "mistral": Family(architecture="MistralForCausalLM", keys=frozenset({"rms_norm_eps", "sliding_window"})),
        "qwen2": Family(
            architecture="Qwen2ForCausalLM", keys=frozenset({"rms_norm_eps", *_WINDOW}), qkv_bias=True,
            has_head_dim=False,
        ),
        "qwen3": Family(
            architecture="Qwen3ForCausalLM", keys=frozenset({"rms_norm_eps", "attention_bias", *_WINDOW}),
            qkv_bias="attention_bias", out_bias="attention_bias", has_qk_norm=True,
        ),
        "smollm3": Family(
            architecture="SmolLM3ForCausalLM",
            keys=frozenset({
                "rms_norm_eps", "attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval", *_WINDOW,
            }),
            qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias", has_head_dim=False,
            defaults=MappingProxyType({"no_rope_layer_interval": 4}),
        ),
        "starcoder2": Family(
            architecture="Starcoder2ForCausalLM",
            keys=frozenset({"norm_epsilon", "use_bias", "sliding_window", "residual_dropout", "embedding_dropout"}),
            norm=Norm.LAYER, norm_eps="norm_epsilon", is_gated=False, has_head_dim=False,
            qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias",
            defaults=MappingProxyType({"use_bias": True, "hidden_act": "gelu_pytorch_tanh"}),
        ),
    }
)  # fmt: skip

FAMILY_KEYS: frozenset[str] = frozenset[str]().union(*(family.keys for family in FAMILIES.values()))
"""Keys that not every family has."""

ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {
        "silu": "silu",
        "gelu": "gelu",
        "gelu_tanh": "gelu_pytorch_tanh",
        "gelu_pytorch_tanh": "gelu_pytorch_tanh",
        "relu2": "relu2",
    }
)
"""What `hidden_act` may say → transformers' word for it."""
