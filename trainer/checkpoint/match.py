"""Does a checkpoint fit the model that a config describes? From its tables alone; no torch.

Names and shapes must agree exactly. Everything else of the architecture may be another on purpose (a longer context
asks for another rope_theta), but changes what the weights compute: it is told, never corrected.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.naming import MANIFEST
from trainer.checkpoint.reader import Checkpoint, open_checkpoint
from trainer.config.architecture import ModelConfig
from trainer.errors import CheckpointInvalid, ConfigError
from trainer.mup import attention_scale, output_multiplier, standard_attention_scale
from trainer.spec import HEAD, ParamSpec

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.config.model import Config

KEY = "model.init_method.path"

# Facts of the architecture that change what weights of the same shapes compute.
_FACTS = ("rope", "rope_layers", "norm_eps", "activation")


def open_start(path: "Path") -> Checkpoint:
    """The checkpoint that a fresh run starts from. Raises ConfigError: another path is needed, not another try."""
    if (path / "config.json").is_file() and not (path / MANIFEST).exists():
        raise ConfigError(
            f"{KEY}: {path} is a Hugging Face folder. Make a checkpoint of it first: pawl import {path} --out CKPT."
        )
    try:
        return open_checkpoint(path)
    except CheckpointInvalid as error:
        raise ConfigError(f"{KEY}: {error}") from error


def misfit(checkpoint: Checkpoint, specs: Sequence[ParamSpec]) -> str | None:
    """The first tensor (by name) that the checkpoint and the model have in another shape, or only one of them has."""
    saved = {name: tensor.shape for name, tensor in checkpoint.index.tensors.items()}
    wanted = {spec.name: spec.shape for spec in specs}
    different = sorted(name for name in saved.keys() | wanted.keys() if saved.get(name) != wanted.get(name))
    if not different:
        return None
    name = different[0]
    hint = " (tie_word_embeddings decides whether there is one)" if name == HEAD else ""
    return (
        f"{len(different)} tensors differ, the first is {name}{hint}: checkpoint {_shape(saved.get(name))}, "
        f"config {_shape(wanted.get(name))}"
    )


def model_of(record: Mapping[str, Any]) -> ModelConfig:
    """The architecture in a manifest's model_config, which holds other facts too and, if old, fewer keys.

    Raises pydantic's ValidationError (a ValueError) where it is none.
    """
    return ModelConfig(**{key: value for key, value in record.items() if key in ModelConfig.model_fields})


def other_numbers(checkpoint: Checkpoint, config: "Config") -> Iterator[str]:
    """A sentence for each fact of the architecture that changes what the weights compute."""
    saved, model = checkpoint.manifest.model_config, config.model.model_config_
    try:
        before = model_of(saved)
    except ValueError:
        yield f"the manifest of {checkpoint.path} does not describe its model; nothing but names and shapes is compared"
        return
    for fact in _FACTS:
        was, is_now = getattr(before, fact), getattr(model, fact)
        if was != is_now:
            yield f"{fact} is {is_now}, the checkpoint was made with {was} (model.model_config)"
    factors = _factors(saved, before.head_size)
    now = {"attention_scale": attention_scale(config), "output_multiplier": output_multiplier(config)}
    for name, value in now.items():
        if value != factors[name]:
            yield (
                f"{name} is {value:g}, the checkpoint was made with {factors[name]:g} (model.init_method.use_mup): the "
                "weights compute other numbers"
            )


def _factors(saved: Mapping[str, Any], head_dim: int) -> dict[str, float]:
    return {
        "attention_scale": float(saved.get("attention_scale", standard_attention_scale(head_dim))),
        "output_multiplier": float(saved.get("output_multiplier", 1.0)),
    }


def _shape(shape: tuple[int, ...] | None) -> str:
    return "has none" if shape is None else "×".join(map(str, shape))
