"""Which class trains which `model.model_config.model_type`."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from trainer.layers.factory import LayerFactory
from trainer.mesh.topology import Topology
from trainer.models.families import FAMILIES
from trainer.models.llama import Llama

if TYPE_CHECKING:
    from trainer.config.model import Config

# A family that does not fit into the columns of `families.py` has a class and a line of its own.
MODELS: Mapping[str, type[Llama]] = MappingProxyType(dict.fromkeys(FAMILIES, Llama))


def build_model(config: "Config", layers: LayerFactory, topology: Topology) -> Llama:
    """The DAG of the config's model."""
    return MODELS[config.model.model_config.model_type](config, layers, topology)
