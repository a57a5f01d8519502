"""config.json of a Hugging Face folder → the model section, or everything that stands against it, by field.

    a key that pawl knows              read and judged as the same key of a pawl config
    a key that is missing              what transformers takes for this family, where that is another value than pawl's
    a key that only other software     carried: kept as it stands and written back by an export
    has a use for

Nothing is guessed: what changes the numbers and is not offered here is refused before any work starts.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from trainer.config.architecture import ModelConfig
from trainer.config.load import own_sections
from trainer.config.model import Model
from trainer.config.problems import Problem, Severity
from trainer.config.yaml_loader import Mapping as MappingNode
from trainer.config.yaml_loader import Node, Scalar, Sequence
from trainer.errors import TrainerError
from trainer.models.families import FAMILIES, FAMILY_KEYS

CONFIG_JSON = "config.json"

_M = "model.model_config."
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_SPELLED_TWICE = ("rope_scaling", "rope_parameters")
_COMPUTED = ("architectures", "model_type", "dtype", "torch_dtype", *_SPELLED_TWICE)
_FLOATS = ("float64", "float32", "bfloat16", "float16")

_RMS = {"rms_norm_eps": 1e-6}
_LLAMA = {**_RMS, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}
_QWEN = {**_RMS, "num_key_value_heads": 32, "max_position_embeddings": 32768}
_SMOLLM3_TOKENS = {"bos_token_id": 128000, "eos_token_id": 128001, "pad_token_id": 128004}
DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": _LLAMA,
        "mistral": {**_LLAMA, "max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        "qwen2": _QWEN,
        "qwen3": {**_QWEN, "head_dim": 128},
        "smollm3": {
            **_RMS, "max_position_embeddings": 32768, "num_key_value_heads": 4, "rope_theta": 2000000.0,
            "tie_word_embeddings": True, **_SMOLLM3_TOKENS,
        },
        "starcoder2": {
            "max_position_embeddings": 4096, "num_key_value_heads": 2, "initializer_range": 0.018042,
            "tie_word_embeddings": True, "bos_token_id": 50256, "eos_token_id": 50256,
        },
    }
)  # fmt: skip
"""What a missing key means to transformers, where ModelConfig's own default is another value."""


class ConvertError(TrainerError):
    """Something cannot be brought into the asked format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HfModel:
    """A config.json that was understood. dtype: of its weights as it says, None where it does not."""

    model: ModelConfig
    dtype: str | None
    transformers_version: str | None
    notes: tuple[str, ...]


def read_hf_config(record: Mapping[str, Any], *, where: str) -> HfModel:
    """Understand a config.json. Raises ConvertError that names every field that stands against it."""
    kind = str(record.get("model_type"))
    if kind not in FAMILIES:
        mixture = " (a mixture of experts)" if "moe" in kind or kind == "mixtral" else ""
        raise ConvertError(f"{where}: model_type {kind!r}{mixture} is not offered; offered are {', '.join(FAMILIES)}.")
    refused = list(_refused(record, kind))
    given = {key: value for key, value in record.items() if _is_ours(key, value, kind)}
    known = {**_defaults(record, kind), **given, "model_type": kind}
    tokens = known.get("eos_token_id")
    if isinstance(tokens, list) and tokens:  # pawl needs one; an export writes all
        known["eos_token_id"] = tokens[0]
    left = {key: value for key, value in record.items() if key not in given and key not in _COMPUTED}
    if isinstance(tokens, list):
        left["eos_token_id"] = tokens
    if left:
        known["carried"] = json.dumps(left, sort_keys=True)
    model, problems = read_model_config(known)
    refused += [_sentence(problem) for problem in problems]
    if refused or model is None:
        raise ConvertError("\n".join(f"{where}: {sentence}" for sentence in refused))
    without_use = sorted(left.keys() - {"eos_token_id", "transformers_version", "use_cache"})
    carried = f"kept for exports, without effect here: {', '.join(without_use)}"
    version = record.get("transformers_version")
    return HfModel(
        model=model,
        dtype=_dtype(record),
        transformers_version=None if version is None else str(version),
        notes=(carried,) if without_use else (),
    )


def read_model_config(known: Mapping[str, Any]) -> tuple[ModelConfig | None, tuple[Problem, ...]]:
    """The model section from plain values by the rules of a config, or the errors about it."""
    tree = node_of({"model": {"model_config": dict(known)}})
    assert isinstance(tree, MappingNode)
    config, problems = own_sections(tree)
    errors = tuple(p for p in problems if p.severity is Severity.ERROR and p.key.startswith(_M.rstrip(".")))
    model = None if errors else getattr(config, "model", None)
    return (model.model_config_ if isinstance(model, Model) else None), errors


def node_of(value: Any) -> Node:
    """Plain values (of JSON) as a config's tree; text counts as quoted."""
    mark = {"file": CONFIG_JSON, "line": 0}
    if isinstance(value, Mapping):
        return MappingNode(entries={key: node_of(child) for key, child in value.items()}, **mark)  # type: ignore[arg-type]
    if isinstance(value, list | tuple):
        return Sequence(items=tuple(map(node_of, value)), **mark)  # type: ignore[arg-type]
    text = value if isinstance(value, str) else json.dumps(value)
    return Scalar(text=text, quoted=isinstance(value, str), **mark)  # type: ignore[arg-type]


def _is_ours(key: str, value: Any, kind: str) -> bool:
    """Whether a key goes into the model section; one of another family does where it says more than 'off'."""
    if key in _SPELLED_TWICE:
        return True
    if key not in ModelConfig.model_fields or key == "carried":
        return False
    return key not in FAMILY_KEYS or key in FAMILIES[kind].keys or bool(value)


def _defaults(record: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """DEFAULTS of what is missing. Special ids are left out where the vocabulary does not reach them."""
    vocab = record.get("vocab_size")
    found = {key: value for key, value in DEFAULTS[kind].items() if key not in record}
    if _has_theta(record):
        found.pop("rope_theta", None)
    for key in _TOKENS:
        if not isinstance(vocab, int) or found.get(key, 0) >= vocab:
            found.pop(key, None)
    return found


def _has_theta(record: Mapping[str, Any]) -> bool:
    return any("rope_theta" in (record.get(key) or {}) for key in _SPELLED_TWICE)


def _refused(record: Mapping[str, Any], kind: str) -> Iterator[str]:
    """What no key of a pawl config stands for and yet changes the numbers."""
    if record.get("quantization_config") is not None:
        yield "quantization_config is given: quantised weights are not read. Use the unquantised model."
    wanted = FAMILIES[kind].architecture
    other = [name for name in record.get("architectures") or () if name != wanted]
    if other:
        yield f"architectures says {other[0]}; of model_type {kind} only {wanted} is offered."
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if (record.get(key) or 0) > 1:
            yield f"{key} is {record[key]}: mixtures of experts are not offered."
    if record.get("partial_rotary_factor", 1.0) not in (1, None):
        yield f"partial_rotary_factor is {record['partial_rotary_factor']}: only 1 (the whole head is rotated) is."
    dtype = record.get("dtype", record.get("torch_dtype"))
    if dtype is not None and _dtype(record) is None:
        yield f"dtype {dtype!r} is not offered; offered are {', '.join(_FLOATS)}."


def _dtype(record: Mapping[str, Any]) -> str | None:
    name = str(record.get("dtype") or record.get("torch_dtype")).removeprefix("torch.")
    return name if name in _FLOATS else None


def _sentence(problem: Problem) -> str:
    """A problem of the model section in config.json's words."""
    key = problem.key.removeprefix(_M)
    found = f" is {problem.found}" if problem.found is not None else ""
    expected = f" Expected: {problem.expected}." if problem.expected else ""
    return f"{key}{found}: {problem.message}.{expected}"
