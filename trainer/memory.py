"""Memory of the fullest rank, estimated from the config alone. Pure; an estimate, and called so wherever it is shown.

    parameters    compute dtype, this rank's share of tp and pp (a tied embedding on each rank that uses it)
    gradients     fp32 (fp64 when computing in fp64), all of the rank's parameters, one buffer per tie site
    optimizer     master copy (fp32 and fp64 parameters are their own) and two moments; ZeRO-1 divides both by dp
    activations   what backward needs of all micro-batches in flight on the rank, and the widest temporaries
    logits        one chunk of the vocabulary-parallel cross-entropy, and the head's gradient that waits for backward

Dims: B micro-batch · T sequence · D hidden · F ffn · H heads · K kv heads · d head dim · V vocab.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from trainer.flops import Gpu
from trainer.mesh.topology import Topology
from trainer.pipeline.generators import make_schedule
from trainer.pipeline.partition import is_schedule_file, placement, stage_layers
from trainer.pipeline.schedule import Schedule
from trainer.pipeline.validate import peak_held
from trainer.spec import ParamSpec, local_shape, param_specs, specs_on_rank

if TYPE_CHECKING:
    from trainer.config import Config

DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}

# Elements of the logits that exist at one time on an accelerator (trainer/layers/vocab.py).
LOGITS_CHUNK_NUMEL = 1 << 27

# What a process holds besides its tensors: CUDA context, NCCL buffers; and the share the allocator cannot use.
FIXED_BYTES = 3 << 29
USABLE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of one rank by purpose."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.logits

    def as_dict(self) -> dict[str, int]:
        """The record's form, `total` included."""
        parts = ("parameters", "gradients", "optimizer", "activations", "logits", "total")
        return {name: int(getattr(self, name)) for name in parts}


def rank_memory(
    config: "Config", *, micro_batch_size: int | None = None, schedule: Schedule | None = None
) -> RankMemory:
    """The fullest rank of the mesh; `micro_batch_size` asks what another one would take.

    `schedule`: the one in the file that the config names. Without it a file counts as AFAB, the most it could hold.
    """
    topology = topology_of(config)
    specs = param_specs(config, topology)
    size = config.tokens.micro_batch_size if micro_batch_size is None else micro_batch_size
    ranks = (_rank_memory(config, specs, rank, schedule, size) for rank in range(topology.pp))
    return max(ranks, key=lambda memory: memory.total)


def topology_of(config: "Config") -> Topology:
    """The mesh of a config."""
    mesh = config.parallelism
    return Topology(dp=mesh.dp, pp=mesh.pp, tp=mesh.tp, cp=mesh.cp)


def _rank_memory(
    config: "Config", specs: tuple[ParamSpec, ...], rank: int, schedule: Schedule | None, size: int
) -> RankMemory:
    mesh = config.parallelism
    width = DTYPE_BYTES[config.compute_dtype]
    wide = max(4, width)
    here = [(spec, math.prod(local_shape(spec, mesh.tp, 0))) for spec in specs_on_rank(specs, rank)]
    numel = sum(count for _, count in here)
    # A second site of a tied weight on the same rank accumulates in a buffer of its own.
    more_sites = sum(count * (spec.tie_sites - len(spec.pp_ranks)) for spec, count in here)
    shards = mesh.dp if config.optimizer.zero_stage == 1 else 1
    states = 3 if width < wide else 2
    return RankMemory(
        parameters=numel * width,
        gradients=(numel + more_sites) * wide,
        optimizer=-(-numel * states * wide // shards),
        activations=_activations(config, rank, schedule, size),
        logits=_logits(config, rank, schedule, size),
    )


def _activations(config: "Config", rank: int, schedule: Schedule | None, micro_batch_size: int) -> int:
    """What the rank's own order of actions makes it hold at most, and the widest temporaries.

    Per layer and token: 2 D (both norms' inputs), 2 D (their outputs, whole on every rank for the products to come),
    2 (H+K)·d (q, k, v, attention out), with head norms (H+K)·d more (their inputs), 4 F. tp divides all but the D, and
    with sequence parallelism the first. Kernels as on a GPU: fused norm and attention. From I to W a layer keeps the
    inputs of its linear layers and the gradients of their outputs: 4 D, 2 (H+K)·d, 3 F.

    With document masks each stage with layers keeps a mask of T numbers a token.

    A layer that is recomputed keeps its input, under `selective` also its linear layers' products: 2 D (whole on every
    rank, before they are summed over tp), (H+2K)·d and 2 F. While it is recomputed it is there whole, one at a time.
    """
    model, mesh = config.model.model_config, config.parallelism
    tokens = micro_batch_size * config.tokens.sequence_length // mesh.cp
    heads = 2 * (model.num_attention_heads + model.num_key_value_heads) * model.head_dim // mesh.tp
    ffn = model.intermediate_size // mesh.tp
    between = model.hidden_size // (mesh.tp if config.sequence_parallel else 1)
    layer = 2 * between + 2 * model.hidden_size + heads + (heads // 2 if model.qk_norm else 0) + 4 * ffn
    pending = 4 * model.hidden_size + heads + 3 * ffn
    projected = (model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim // mesh.tp + 2 * ffn
    kept = {"none": layer, "full": between, "selective": between + 2 * model.hidden_size + projected}
    where = placement(config, mesh.pp)
    layers = stage_layers(config, where.num_stages)
    of_layer = [kept[config.model.recompute_of(number)] for number in range(sum(layers))]
    of_stage = [of_layer[sum(layers[:s]) : sum(layers[: s + 1])] for s in range(where.num_stages)]
    mask = config.tokens.sequence_length if config.tokens.document_masks else 0
    alive = [sum(stage) + between + (mask if stage else 0) for stage in of_stage]
    peak = _held(config, rank, schedule, alive, [count * pending for count in layers])
    again = max((layer - numel for stage in where.stages_of(rank) for numel in of_stage[stage]), default=0)
    temporary = 2 * model.hidden_size + 3 * ffn
    return tokens * (peak + temporary + again) * DTYPE_BYTES[config.compute_dtype]


def _held(config: "Config", rank: int, schedule: Schedule | None, alive: Sequence[int], pending: Sequence[int]) -> int:
    """The most that the rank's order of actions makes it hold, in the unit of `alive` and `pending` (by stage)."""
    mesh, m = config.parallelism, config.num_micro_batches
    p, where = mesh.pp, placement(config, mesh.pp)
    if schedule is None and (mesh.pp_engine == "afab" or is_schedule_file(mesh.pp_engine)):
        return m * sum(alive[stage] for stage in where.stages_of(rank))
    if schedule is None:
        enough = m % p + p * max(4, p)  # with more micro-batches no rank ever holds more
        schedule = _named_schedule(mesh.pp_engine, p, min(m, enough), where.v)
    return peak_held(schedule.lists[rank], alive, pending)


@lru_cache(maxsize=8)
def _named_schedule(name: str, p: int, m: int, v: int) -> Schedule:
    """A schedule made once: the estimate is asked for many micro-batch sizes."""
    return make_schedule(name, p=p, m=m, v=v)


def _logits(config: "Config", rank: int, schedule: Schedule | None, micro_batch_size: int) -> int:
    """One chunk of logits in the statistics dtype and once more in the compute dtype; and what each micro-batch in
    flight on the last stage keeps: the gradients of its hidden states and of the head, made along with the loss."""
    model, mesh = config.model.model_config, config.parallelism
    width = DTYPE_BYTES[config.compute_dtype]
    wide = max(4, width)
    last = placement(config, mesh.pp).num_stages - 1
    in_flight = _held(config, rank, schedule, [0] * last + [1], [0] * (last + 1))
    tokens = micro_batch_size * config.tokens.sequence_length // mesh.cp
    vocab = -(-model.vocab_size // mesh.tp)
    chunk = min(tokens * vocab, LOGITS_CHUNK_NUMEL) * (wide + (width if width < wide else 0))
    kept = (tokens * width + vocab * wide) * model.hidden_size
    return (chunk if in_flight else 0) + kept * in_flight


def usable_bytes(gpu: Gpu) -> int:
    """What a rank's tensors may take on one GPU."""
    return int((gpu.memory_bytes - FIXED_BYTES) * USABLE)


def largest_micro_batch(config: "Config", available_bytes: int) -> int | None:
    """The largest micro_batch_size whose estimate fits `available_bytes`; None when not even 1 does.

    Memory grows linearly with the micro-batch, except for the loss chunk; so walk up by doubling, then bisect.
    """
    if rank_memory(config, micro_batch_size=1).total > available_bytes:
        return None
    fits, too_many = 1, 2
    while too_many <= 1 << 16 and rank_memory(config, micro_batch_size=too_many).total <= available_bytes:
        fits, too_many = too_many, too_many * 2
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if rank_memory(config, micro_batch_size=middle).total <= available_bytes:
            fits = middle
        else:
            too_many = middle
    return fits
