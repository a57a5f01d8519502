"""The decoder that Llama, Mistral, Qwen, SmolLM and StarCoder2 are, as a DAG of pipeline blocks.

What differs between them is in the rows of `families.py`.

    input_ids ─▶ embed_tokens ─▶ layers.0 ─▶ … ─▶ layers.L−1 ─▶ norm ─▶ lm_head + loss ◀─ labels, num_valid
                                    ▲ position_ids (and the mask of documents made from them, where asked for)

Labels and positions never travel between stages: each stage reads them from its own batch. What travels is the hidden
state [B, t, D]; t is T, or T / tp with sequence parallelism.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from trainer.device import statistics_dtype
from trainer.layers.attention import CausalSelfAttention
from trainer.layers.documents import DocumentMask
from trainer.layers.factory import LayerFactory
from trainer.layers.mlp import GatedMLP, PlainMLP
from trainer.layers.rotary import Rotary
from trainer.layers.tied import TiedParameter
from trainer.mesh.topology import Topology
from trainer.mup import attention_scale, output_multiplier
from trainer.pipeline.block import PipelineBlock, TensorPointer
from trainer.pipeline.graph import Meta
from trainer.pipeline.partition import placement, stage_layers, stage_of_layer
from trainer.spec import EMBEDDING, HEAD

if TYPE_CHECKING:
    from trainer.config.model import Config


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream. hidden [B, t, D].

    `rotary`: None in a layer without rotary positions.
    """

    def __init__(self, config: "Config", layers: LayerFactory, rotary: Rotary | None) -> None:
        super().__init__()
        shape, family = config.model.model_config, config.model.model_config.family
        hidden, eps = shape.hidden_size, shape.norm_eps
        self.input_layernorm = layers.norm(hidden, eps=eps, kind=family.norm)
        self.self_attn = CausalSelfAttention(
            layers, hidden_size=hidden, num_heads=shape.num_attention_heads, num_kv_heads=shape.kv_heads,
            head_dim=shape.head_size, rotary=rotary, scale=attention_scale(config), qkv_bias=shape.qkv_bias,
            out_bias=shape.out_bias, qk_norm_eps=eps if shape.qk_norm else None,
        )  # fmt: skip
        self.post_attention_layernorm = layers.norm(hidden, eps=eps, kind=family.norm)
        self.mlp = (GatedMLP if family.is_gated else PlainMLP)(
            layers, hidden_size=hidden, intermediate_size=shape.intermediate_size, activation=shape.activation,
            bias=shape.ffn_bias,
        )  # fmt: skip

    def forward(
        self, hidden: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), position_ids, mask)
        out: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Llama(nn.Module):
    """The DAG. `forward` is only ever traced; the pipeline interpreter calls the blocks."""

    def __init__(self, config: "Config", layers: LayerFactory, topology: Topology) -> None:
        super().__init__()
        where = placement(config, topology.pp)
        shape, last = config.model.model_config, where.num_stages - 1
        hidden, vocab = shape.hidden_size, shape.vocab_size
        rotary = Rotary(
            head_dim=shape.head_size, rope=shape.rope, max_positions=config.tokens.sequence_length, dtype=layers.dtype,
        )  # fmt: skip
        counts = stage_layers(config, where.num_stages)
        embedding = partial(layers.embedding, vocab, hidden)
        embedded = partial(_embedded, hidden_size=hidden, layers=layers)
        self.embed = PipelineBlock(embedding, name="model.embed_tokens", stage=0, outputs=embedded)
        decoder, rotaries = partial(DecoderLayer, config, layers), [rotary if on else None for on in shape.rope_layers]
        self.layers = nn.ModuleList(
            PipelineBlock(
                partial(decoder, rotaries[i]), name=f"model.layers.{i}", stage=stage, outputs=_same_hidden, layer=i
            )
            for i, stage in enumerate(stage_of_layer(counts))
        )
        self.layer_stages = stage_of_layer(counts)
        self.masks = nn.ModuleDict()
        if config.tokens.document_masks:
            make, shape_of = partial(DocumentMask, layers.dtype), partial(_mask_shape, dtype=layers.dtype)
            for stage in (stage for stage, count in enumerate(counts) if count):
                name = f"document_mask_{stage}"
                self.masks[str(stage)] = PipelineBlock(make, name=name, stage=stage, outputs=shape_of)
        norm = partial(layers.norm, hidden, eps=shape.norm_eps, kind=shape.family.norm)
        final = partial(_FinalNorm, norm, multiplier=output_multiplier(config))
        self.norm = PipelineBlock(final, name="model", stage=last, outputs=_same_hidden)
        head = partial(layers.head, vocab, hidden)
        scalar = partial(_scalar_loss, dtype=layers.dtype)
        self.head = PipelineBlock(head, name="lm_head", stage=last, outputs=scalar)
        self.ties: tuple[TiedParameter, ...] = ()
        if shape.tie_word_embeddings:
            self.ties = (TiedParameter(name=EMBEDDING, sites=((where.ranks[0], EMBEDDING), (where.ranks[last], HEAD))),)

    def forward(
        self, *, input_ids: TensorPointer, labels: TensorPointer, position_ids: TensorPointer, num_valid: TensorPointer
    ) -> TensorPointer:
        hidden = self.embed(input_ids=input_ids)
        masks = {int(stage): make(position_ids=position_ids) for stage, make in self.masks.items()}
        for layer, stage in zip(self.layers, self.layer_stages, strict=True):
            mask = {"mask": masks[stage]} if masks else {}
            hidden = layer(hidden=hidden, position_ids=position_ids, **mask)
        loss: TensorPointer = self.head(hidden=self.norm(hidden=hidden), labels=labels, num_valid=num_valid)
        return loss


class _FinalNorm(nn.Module):
    """The norm before the head, nested so that its parameter is called `model.norm.weight`; muP's output multiplier."""

    def __init__(self, make_norm: Callable[[], nn.Module], *, multiplier: float) -> None:
        super().__init__()
        self.norm, self.multiplier = make_norm(), multiplier

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(hidden)
        return out if self.multiplier == 1.0 else out * self.multiplier


def _embedded(*, input_ids: Meta, hidden_size: int, layers: LayerFactory) -> Meta:
    name, (batch, length) = str(layers.dtype).removeprefix("torch."), input_ids.shape
    return Meta(shape=(batch, layers.tokens_here(length), hidden_size), dtype=name, is_floating=True)


def _mask_shape(*, position_ids: Meta, dtype: torch.dtype) -> Meta:
    batch, length = position_ids.shape
    name = str(dtype).removeprefix("torch.")
    return Meta(shape=(batch, 1, length, length), dtype=name, is_floating=True)


def _same_hidden(*, hidden: Meta, **_: Meta | None) -> Meta:
    return hidden


def _scalar_loss(*, dtype: torch.dtype, **_: Meta | None) -> Meta:
    return Meta(shape=(), dtype=str(statistics_dtype(dtype)).removeprefix("torch."), is_floating=True)
