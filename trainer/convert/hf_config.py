"""config.json and generation_config.json of a Hugging Face folder, from the architecture in a manifest.

Both spellings are written where readers of different age differ: `rope_parameters` (transformers 5) beside
`rope_theta`, `dtype` beside `torch_dtype`. `head_dim` is always written: readers that derive it go wrong for models
where it is not hidden_size / num_attention_heads.
"""

from collections.abc import Mapping
from typing import Any

_COPIED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "hidden_act",
    "rms_norm_eps",
    "rope_theta",
    "tie_word_embeddings",
    "initializer_range",
    "attention_dropout",
)

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


# model_type → (class in transformers, keys that only it has; None: the manifest's value, false where it has none)
_FAMILIES: Mapping[str, tuple[str, Mapping[str, bool | None]]] = {
    "llama": ("LlamaForCausalLM", {"attention_bias": None, "mlp_bias": None}),
    "qwen2": ("Qwen2ForCausalLM", {"use_sliding_window": False}),
    "qwen3": ("Qwen3ForCausalLM", {"attention_bias": None, "use_sliding_window": False}),
}


def hf_config(model: Mapping[str, Any], *, dtype: str, eos_id: int | None) -> dict[str, Any]:
    """config.json for transformers. eos_id: of the tokenizer, used where the model section names none."""
    architecture, keys = _FAMILIES[model["model_type"]]
    return {
        "architectures": [architecture],
        "model_type": model["model_type"],
        **{key: model[key] for key in _COPIED},
        "rope_parameters": {"rope_type": "default", "rope_theta": model["rope_theta"]},
        **{key: bool(model.get(key, False)) if value is None else value for key, value in keys.items()},
        **token_ids(model, eos_id=eos_id),
        "dtype": dtype,
        "torch_dtype": dtype,
        "use_cache": True,
    }


def generation_config(model: Mapping[str, Any], *, eos_id: int | None) -> dict[str, Any]:
    """generation_config.json: how to stop, and nothing else a user did not ask for."""
    known = {key: value for key, value in token_ids(model, eos_id=eos_id).items() if value is not None}
    return {"_from_model_config": True, **known}


def token_ids(model: Mapping[str, Any], *, eos_id: int | None) -> dict[str, int | None]:
    """The special ids of the model section, the end token from the tokenizer where the section has none.

    An id is written as null when it is not known: transformers would otherwise fill in Llama 2's 1 and 2.
    """
    ids: dict[str, int | None] = {key: model.get(key) for key in _TOKENS}
    if ids["eos_token_id"] is None:
        ids["eos_token_id"] = eos_id
    return ids
