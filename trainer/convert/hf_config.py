"""config.json and generation_config.json of a Hugging Face folder, from the architecture in a manifest.

Both spellings are written where readers of different age differ: `rope_parameters` (transformers 5) beside `rope_theta`
and `rope_scaling`, `dtype` beside `torch_dtype`. `head_dim` is always written: readers that derive it go wrong for
models where it is not hidden_size / num_attention_heads. Keys that an import carried are written back as they were.
"""

import json
from collections.abc import Mapping
from typing import Any

from trainer.checkpoint.match import model_of
from trainer.config.architecture import ModelConfig

_COPIED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rope_theta",
    "tie_word_embeddings",
    "initializer_range",
    "attention_dropout",
)

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")

# null says something: a reader's own default would be a window.
_NULL_IS_SAID = frozenset({"sliding_window"})


def hf_config(record: Mapping[str, Any], *, dtype: str, eos_id: int | None) -> dict[str, Any]:
    """config.json for transformers. eos_id: of the tokenizer, used where the model section names none."""
    model = model_of(record)
    own = {key: getattr(model, key) for key in sorted(model.family.keys)}
    if "no_rope_layers" in own:
        own["no_rope_layers"] = [int(has_rope) for has_rope in model.rope_layers]
    rope = model.rope.model_dump(exclude_none=True)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "architectures": [model.family.architecture],
        "model_type": model.model_type,
        **{key: getattr(model, key) for key in _COPIED},
        "hidden_act": model.activation,
        "rope_parameters": rope,
        "rope_scaling": None if model.rope.rope_type == "default" else scaling,
        **{key: value for key, value in own.items() if value is not None or key in _NULL_IS_SAID},
        **token_ids(record, eos_id=eos_id),
        "dtype": dtype,
        "torch_dtype": dtype,
        "use_cache": True,
        **_carried(model),
    }


def generation_config(record: Mapping[str, Any], *, eos_id: int | None) -> dict[str, Any]:
    """generation_config.json: how to stop, and nothing else a user did not ask for."""
    ids = {**token_ids(record, eos_id=eos_id), **_carried(model_of(record))}
    return {"_from_model_config": True, **{key: ids[key] for key in _TOKENS if ids[key] is not None}}


def token_ids(record: Mapping[str, Any], *, eos_id: int | None) -> dict[str, int | None]:
    """The special ids of the model section, the end token from the tokenizer where the section has none.

    An id is written as null when it is not known: transformers would otherwise fill in Llama 2's 1 and 2.
    """
    ids: dict[str, int | None] = {key: record.get(key) for key in _TOKENS}
    if ids["eos_token_id"] is None:
        ids["eos_token_id"] = eos_id
    return ids


def _carried(model: ModelConfig) -> dict[str, Any]:
    return {} if model.carried is None else dict(json.loads(model.carried))
