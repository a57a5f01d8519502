"""Which class trains which `model.model_config.model_type`."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from trainer.layers.factory import LayerFactory
from trainer.mesh.topology import Topology
from trainer.models.llama import Llama
from trainer.models.qwen3 import Qwen3

if TYPE_CHECKING:
    from trainer.config.model import Config

# Qwen2 is Llama with biases on q, k and v (`ModelConfig.qkv_bias`).
MODELS: Mapping[str, type[Llama]] = MappingProxyType({"llama": Llama, "qwen2": Llama, "qwen3": Qwen3})


def build_model(config: "Config", layers: LayerFactory, topology: Topology) -> Llama:
    """The DAG of the config's model."""
    return MODELS[config.model.model_config.model_type](config, layers, topology)
