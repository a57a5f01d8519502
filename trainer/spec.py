"""ParamSpec: the one table that drives initialisation, sharding, gradients, checkpoints and export. No torch.

Each canonical tensor (Hugging Face name, full unpadded shape) has one row that says which dim tensor parallelism cuts,
on which pipeline stages and ranks it lives, how it is drawn, how it decays. Everything else in the trainer *reads*
this table: two places for one of these facts is how parallel trainers go wrong.

Dims: V vocab · D hidden · F ffn · H heads · K kv heads · d head dim.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from trainer.errors import ConfigError
from trainer.mesh.topology import Topology
from trainer.models.families import Norm
from trainer.mup import lr_multiplier, spectral_std
from trainer.optim.groups import group_of
from trainer.pipeline.partition import placement, stage_layers, stage_of_layer
from trainer.pipeline.schedule import Placement

if TYPE_CHECKING:
    from trainer.config.model import Config, ParameterGroup

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"
_LAYER = re.compile(r"model\.layers\.\d+")


class InitKind(StrEnum):
    NORMAL = "normal"
    ONES = "ones"
    ZEROS = "zeros"


@dataclass(frozen=True, slots=True, kw_only=True)
class Init:
    """How a tensor is drawn; `std` is 0 for the constant kinds."""

    kind: InitKind
    std: float = 0.0


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned rectangle of a tensor: half-open from `offset`, `size` long in each dim."""

    offset: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One canonical tensor. `shape` is what a checkpoint holds, `padded_shape` what tp divides evenly.

    `stages`: pipeline stages that use it, in tie-site order (a tied embedding: the first and the last).
    `pp_ranks`: pipeline ranks that hold a copy, in the same order, each once (both tie sites may be on one rank).
    `tie_sites`: how many places of the model use it (2 for a tied embedding, also when both are on one rank).
    `tp_partial_grad`: whole on every tp rank, whose gradient is a part each and must be summed over tp.
    `lr_mult`, `wd_mult`: factors on learning rate and weight decay, from spectral muP and optimizer.groups. Without a
    group matrices decay (1) and everything else does not (0).
    """

    name: str
    shape: tuple[int, ...]
    padded_shape: tuple[int, ...]
    shard_dim: int | None
    stages: tuple[int, ...]
    pp_ranks: tuple[int, ...]
    init: Init
    wd_mult: float
    fan_in: int
    fan_out: int
    tp_partial_grad: bool = False
    tie_sites: int = 1
    lr_mult: float = 1.0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def param_specs(config: "Config", topology: Topology) -> tuple[ParamSpec, ...]:
    """All canonical tensors of the model in fixed order: embedding, layers in order, final norm, head if untied.

    Raises ConfigError where the shapes cannot be divided over tp or pp.
    """
    check_divisible(config, topology)
    where = placement(config, topology.pp)
    counts = stage_layers(config, where.num_stages)
    specs = _Builder(config=config, topology=topology, placement=where).table(counts)
    return tuple(_grouped(spec, config.optimizer.groups) for spec in specs)


def parameter_names(config: "Config") -> tuple[str, ...]:
    """Canonical names of all parameters, in the table's order; they depend on the model alone."""
    build = _Builder(config=config, topology=Topology(), placement=Placement.loop(1))
    return tuple(spec.name for spec in build.table((config.model.model_config.num_hidden_layers,)))


def block_name(name: str) -> str:
    """The block a canonical tensor belongs to: model.layers.3, model.embed_tokens, model.norm or lm_head."""
    layer = _LAYER.match(name)
    return layer.group() if layer else name.rpartition(".")[0]


def _grouped(spec: ParamSpec, groups: "Sequence[ParameterGroup]") -> ParamSpec:
    """The row with what its group says; muP's factor on the rate stays."""
    group = group_of(spec.name, groups)
    if group is None:
        return spec
    wd_mult = spec.wd_mult if group.weight_decay_mult is None else group.weight_decay_mult
    return replace(spec, lr_mult=spec.lr_mult * group.lr_mult, wd_mult=wd_mult)


def specs_on_rank(specs: Sequence[ParamSpec], pp_rank: int) -> tuple[ParamSpec, ...]:
    """The specs with a copy on pipeline rank `pp_rank`, whichever of its stages use them, in canonical order."""
    return tuple(spec for spec in specs if pp_rank in spec.pp_ranks)


def local_shape(spec: ParamSpec, tp: int, tp_rank: int) -> tuple[int, ...]:
    """Shape of this tp rank's live tensor, padding included; the same on every tp rank."""
    assert 0 <= tp_rank < tp
    return tuple(n // tp if dim == spec.shard_dim else n for dim, n in enumerate(spec.padded_shape))


def local_box(spec: ParamSpec, tp: int, tp_rank: int) -> Box:
    """The part of the canonical tensor this tp rank holds, clipped to the unpadded shape (a size may be 0)."""
    local = local_shape(spec, tp, tp_rank)
    offset = [0] * len(local)
    size = list(local)
    if spec.shard_dim is not None:
        dim = spec.shard_dim
        offset[dim] = min(tp_rank * local[dim], spec.shape[dim])
        size[dim] = min(local[dim], spec.shape[dim] - offset[dim])
    return Box(tuple(offset), tuple(size))


def check_divisible(config: "Config", topology: Topology) -> None:
    """Raises ConfigError unless tp divides heads, kv heads and the intermediate size."""
    model = config.model.model_config
    sizes = {
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.kv_heads,
        "intermediate_size": model.intermediate_size,
    }
    for key, value in sizes.items():
        if value % topology.tp:
            raise ConfigError(
                f"model.model_config.{key} is {value}, which parallelism.tp = {topology.tp} does not divide; set tp to "
                f"a divisor of {value} ({', '.join(str(d) for d in range(1, value + 1) if value % d == 0)})."
            )
    if model.num_attention_heads % model.kv_heads:
        raise ConfigError(
            f"model.model_config.num_attention_heads is {model.num_attention_heads}, not a multiple of "
            f"num_key_value_heads = {model.kv_heads}; every kv head must serve equally many heads."
        )


@dataclass(frozen=True, slots=True)
class _Builder:
    """Rows of the table for one config and mesh."""

    config: "Config"
    topology: Topology
    placement: Placement

    def table(self, layers_per_stage: tuple[int, ...]) -> list[ParamSpec]:
        """All rows in canonical order."""
        tied, last = bool(self.config.model.model_config.tie_word_embeddings), len(layers_per_stage) - 1
        specs = [self.embedding(stages=tuple(dict.fromkeys((0, last))) if tied else (0,), sites=1 + tied)]
        for layer, stage in enumerate(stage_of_layer(layers_per_stage)):
            specs += self.decoder_layer(layer, stage)
        specs += self.norm(FINAL_NORM, last)
        return specs if tied else [*specs, self.head(last)]

    def decoder_layer(self, layer: int, stage: int) -> list[ParamSpec]:
        """The tensors of one layer, in Hugging Face's order."""
        model = self.config.model.model_config
        d, f, prefix = model.hidden_size, model.intermediate_size, f"model.layers.{layer}"
        h, k, qkv_bias = model.num_attention_heads * model.head_size, model.kv_heads * model.head_size, model.qkv_bias
        inner, outer = (("gate_proj", "up_proj"), "down_proj") if model.family.is_gated else (("c_fc",), "c_proj")
        column, row = self.column, self.row
        return [
            *self.norm(f"{prefix}.input_layernorm.weight", stage),
            *column(f"{prefix}.self_attn.q_proj", (h, d), stage, bias=qkv_bias),
            *column(f"{prefix}.self_attn.k_proj", (k, d), stage, bias=qkv_bias),
            *column(f"{prefix}.self_attn.v_proj", (k, d), stage, bias=qkv_bias),
            *row(f"{prefix}.self_attn.o_proj", (d, h), stage, bias=model.out_bias),
            *(self.head_norm(f"{prefix}.self_attn.{x}_norm.weight", stage) for x in "qk" if model.qk_norm),
            *self.norm(f"{prefix}.post_attention_layernorm.weight", stage),
            *(part for name in inner for part in column(f"{prefix}.mlp.{name}", (f, d), stage, bias=model.ffn_bias)),
            *row(f"{prefix}.mlp.{outer}", (d, f), stage, bias=model.ffn_bias),
        ]

    def column(self, name: str, shape: tuple[int, int], stage: int, *, bias: bool) -> list[ParamSpec]:
        """Weight [out, in] cut in its rows, bias [out] cut like them."""
        weight = self._matrix(f"{name}.weight", shape, stage, shard_dim=0, std=self._std)
        one = self._vector(f"{name}.bias", shape[0], stage, InitKind.ZEROS)
        return [weight, replace(one, shard_dim=0)] if bias else [weight]

    def row(self, name: str, shape: tuple[int, int], stage: int, *, bias: bool) -> list[ParamSpec]:
        """Residual outputs are drawn smaller by √(2·layers), so that the residual stream does not grow with depth.

        The bias is whole on every tp rank; with sequence parallelism each adds it to other tokens.
        """
        scaled = self._std / math.sqrt(2 * self.config.model.model_config.num_hidden_layers)
        weight = self._matrix(f"{name}.weight", shape, stage, shard_dim=1, std=scaled)
        one = self._vector(f"{name}.bias", shape[0], stage, InitKind.ZEROS)
        return [weight, replace(one, tp_partial_grad=self.config.sequence_parallel)] if bias else [weight]

    def norm(self, name: str, stage: int) -> list[ParamSpec]:
        """Its weight, called `name`, and a LayerNorm's bias; whole on every tp rank, as a row layer's bias."""
        model, parts = self.config.model.model_config, self.config.sequence_parallel
        weight = self._vector(name, model.hidden_size, stage, InitKind.ONES)
        bias = self._vector(f"{name.removesuffix('weight')}bias", model.hidden_size, stage, InitKind.ZEROS)
        specs = [weight, bias] if model.family.norm is Norm.LAYER else [weight]
        return [replace(spec, tp_partial_grad=parts) for spec in specs]

    def head_norm(self, name: str, stage: int) -> ParamSpec:
        """A norm over one head's size, the same for all heads: each tp rank's gradient is from its own heads."""
        spec = self._vector(name, self.config.model.model_config.head_size, stage, InitKind.ONES)
        return replace(spec, tp_partial_grad=self.topology.tp > 1)

    def _vector(self, name: str, n: int, stage: int, init: InitKind) -> ParamSpec:
        return ParamSpec(
            name=name, shape=(n,), padded_shape=(n,), shard_dim=None, stages=(stage,), pp_ranks=self._ranks(stage),
            init=Init(kind=init), wd_mult=0.0, fan_in=1, fan_out=n,
        )  # fmt: skip

    def embedding(self, *, stages: tuple[int, ...], sites: int) -> ParamSpec:
        """A lookup sums over no width, so muP changes neither its draw nor its rate, also where it is the head too."""
        (v, d), padded = self._vocab_shape, self._padded_vocab_shape
        return ParamSpec(
            name=EMBEDDING, shape=(v, d), padded_shape=padded, shard_dim=0, stages=stages,
            pp_ranks=self._ranks(*stages), tie_sites=sites,
            init=Init(kind=InitKind.NORMAL, std=self._std), wd_mult=1.0, fan_in=d, fan_out=v,
        )  # fmt: skip

    def head(self, stage: int) -> ParamSpec:
        """The head of its own is a matrix like the hidden ones."""
        spec = self._matrix(HEAD, self._vocab_shape, stage, shard_dim=0, std=self._std)
        return replace(spec, padded_shape=self._padded_vocab_shape)

    @property
    def _vocab_shape(self) -> tuple[int, int]:
        model = self.config.model.model_config
        return model.vocab_size, model.hidden_size

    @property
    def _padded_vocab_shape(self) -> tuple[int, int]:
        (v, d), tp = self._vocab_shape, self.topology.tp
        return -(-v // tp) * tp, d

    @property
    def _std(self) -> float:
        std = self.config.model.init_method.std
        return float(self.config.model.model_config.initializer_range if std is None else std)

    def _ranks(self, *stages: int) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.placement.ranks[stage] for stage in stages))

    def _matrix(self, name: str, shape: tuple[int, int], stage: int, *, shard_dim: int, std: float) -> ParamSpec:
        fan_out, fan_in = shape
        mup = bool(self.config.model.init_method.use_mup)
        return ParamSpec(
            name=name, shape=shape, padded_shape=shape, shard_dim=shard_dim, stages=(stage,),
            pp_ranks=self._ranks(stage), wd_mult=1.0,
            init=Init(kind=InitKind.NORMAL, std=spectral_std(fan_in, fan_out) if mup else std),
            fan_in=fan_in, fan_out=fan_out, lr_mult=lr_multiplier(fan_in) if mup else 1.0,
        )  # fmt: skip
