"""Qwen3 (dense): Llama with an RMSNorm on each head of the queries and keys, before the rotary positions."""

from typing import TYPE_CHECKING

from torch import nn

from trainer.layers.attention import CausalSelfAttention
from trainer.layers.factory import LayerFactory
from trainer.layers.rotary import Rotary
from trainer.models.llama import DecoderLayer, Llama, attention

if TYPE_CHECKING:
    from trainer.config.model import Config


class Qwen3Layer(DecoderLayer):
    """A decoder layer whose attention normalises heads. hidden [B, t, D]."""

    def make_attention(self, config: "Config", layers: LayerFactory, rotary: Rotary) -> CausalSelfAttention:
        return attention(config, layers, rotary, qk_norm_eps=config.model.model_config.rms_norm_eps)


class Qwen3(Llama):
    """The DAG of Llama with layers of its own."""

    layer: type[nn.Module] = Qwen3Layer
