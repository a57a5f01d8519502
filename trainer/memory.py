"""Memory of each pipeline rank, estimated from the config alone. Pure; an estimate, and called so wherever it is shown.

    parameters    compute dtype, this rank's share of tp and pp (a tied embedding on each rank that uses it)
    gradients     fp32 (fp64 when computing in fp64), all of the rank's parameters, one buffer per tie site
    optimizer     master copy (fp32 and fp64 parameters are their own) and two moments; ZeRO-1 divides both by dp
    activations   what backward needs of all micro-batches in flight on the rank, and temporaries (activations.py)
    logits        one chunk of the vocabulary-parallel cross-entropy, and the head's gradient that waits for backward
    scratch       messages between stages; on a CPU the copies that gradients are reduced through

The last three are what is there at the fullest moment of a step, which may be another one on each rank.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from trainer.activations import ACCELERATOR, DTYPE_BYTES, Kernels, Need, StageNeed, stage_needs
from trainer.flops import Gpu
from trainer.mesh.topology import Topology
from trainer.optim.layout import plan_layout
from trainer.pipeline.generators import make_schedule
from trainer.pipeline.partition import is_schedule_file, placement
from trainer.pipeline.schedule import Action, Op, Schedule
from trainer.spec import ParamSpec, local_shape, param_specs, specs_on_rank

if TYPE_CHECKING:
    from trainer.config import Config

# What a process holds besides its tensors: CUDA context, NCCL buffers; and the share the allocator cannot use.
FIXED_BYTES = 3 << 29
USABLE = 0.95

UNFINISHED_REDUCTIONS = 2
"""Buckets whose copies exist at one time (trainer/optim/optimizer.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of one rank by purpose. `pp_rank`: which pipeline rank it is; `stages`: what it holds."""

    pp_rank: int
    stages: tuple[int, ...]
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    scratch: int

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in PURPOSES)

    def as_dict(self) -> dict[str, int | list[int]]:
        """The record's form, `total` included."""
        counts = {name: int(getattr(self, name)) for name in (*PURPOSES, "total", "pp_rank")}
        return {**counts, "stages": list(self.stages)}


PURPOSES = ("parameters", "gradients", "optimizer", "activations", "logits", "scratch")


def rank_memory(
    config: "Config", *, micro_batch_size: int | None = None, schedule: Schedule | None = None,
    kernels: Kernels = ACCELERATOR,
) -> RankMemory:  # fmt: skip
    """The fullest pipeline rank; arguments as `memory_of_ranks`."""
    every = memory_of_ranks(config, micro_batch_size=micro_batch_size, schedule=schedule, kernels=kernels)
    return max(every, key=lambda memory: memory.total)


def memory_of_ranks(
    config: "Config", *, micro_batch_size: int | None = None, schedule: Schedule | None = None,
    kernels: Kernels = ACCELERATOR,
) -> tuple[RankMemory, ...]:  # fmt: skip
    """Each pipeline rank; all its dp and tp ranks need the same. `micro_batch_size` asks what another one would take.

    `schedule`: the one in the file that the config names. Without it a file counts as AFAB, the most it could hold.
    """
    topology = topology_of(config)
    specs = param_specs(config, topology)
    size = config.tokens.micro_batch_size if micro_batch_size is None else micro_batch_size
    needs = stage_needs(config, kernels=kernels, micro_batch_size=size)
    return tuple(_rank_memory(config, specs, rank, schedule, needs, kernels) for rank in range(topology.pp))


def topology_of(config: "Config") -> Topology:
    """The mesh of a config."""
    mesh = config.parallelism
    return Topology(dp=mesh.dp, pp=mesh.pp, tp=mesh.tp, cp=mesh.cp)


def _rank_memory(
    config: "Config", specs: tuple[ParamSpec, ...], rank: int, schedule: Schedule | None,
    needs: tuple[StageNeed, ...], kernels: Kernels,
) -> RankMemory:  # fmt: skip
    mesh = config.parallelism
    width = DTYPE_BYTES[config.compute_dtype]
    wide = max(4, width)
    here = [(spec, math.prod(local_shape(spec, mesh.tp, 0))) for spec in specs_on_rank(specs, rank)]
    numel = sum(count for _, count in here)
    # A second site of a tied weight on the same rank accumulates in a buffer of its own.
    more_sites = sum(count * (spec.tie_sites - len(spec.pp_ranks)) for spec, count in here)
    shards = mesh.dp if config.optimizer.zero_stage == 1 else 1
    states = 3 if width < wide else 2
    fullest = max((_need(moment, needs) for moment in _moments(config, rank, schedule)), key=lambda need: need.total)
    messages = needs[0].message * (mesh.pp + 1) if mesh.pp > 1 else 0
    copies = _reduction_copies(specs, topology_of(config), rank) * wide if kernels.copies_messages else 0
    at_end = copies > fullest.total + messages
    return RankMemory(
        pp_rank=rank,
        stages=placement(config, mesh.pp).stages_of(rank),
        parameters=numel * width,
        gradients=(numel + more_sites) * wide,
        optimizer=-(-numel * states * wide // shards),
        activations=0 if at_end else fullest.activations,
        logits=0 if at_end else fullest.logits,
        scratch=copies if at_end else messages,
    )


class Moment(NamedTuple):
    """An action about to run: its kind and stage, and by stage how many micro-batches wait for B or I, and for W."""

    op: Op
    stage: int
    alive: tuple[tuple[int, int], ...]
    pending: tuple[tuple[int, int], ...]


def moments(actions: Sequence[Action]) -> frozenset[Moment]:
    """The different moments of one rank's list: few, however many micro-batches there are."""
    alive = {action.stage: 0 for action in actions}
    pending = dict(alive)
    seen = set()
    for action in actions:
        seen.add(Moment(action.op, action.stage, tuple(alive.items()), tuple(pending.items())))
        if action.op is Op.F:
            alive[action.stage] += 1
        elif action.op in (Op.B, Op.I):
            alive[action.stage] -= 1
            pending[action.stage] += action.op is Op.I
        elif action.op is Op.W:
            pending[action.stage] -= 1
    return frozenset(seen)


def _need(moment: Moment, needs: Sequence[StageNeed]) -> Need:
    """The most that is there while the moment's action runs."""
    held = Need(0)
    for stage, count in moment.alive:
        held = held.plus(needs[stage].kept, count)
    for stage, count in moment.pending:
        held = held.plus(needs[stage].pending, count)
    return max((held.plus(more) for more in needs[moment.stage].during(moment.op)), key=lambda need: need.total)


def _moments(config: "Config", rank: int, schedule: Schedule | None) -> frozenset[Moment]:
    """Those of the config's schedule."""
    if schedule is not None:
        return moments(schedule.lists[rank])
    mesh, m = config.parallelism, config.num_micro_batches
    name = "afab" if is_schedule_file(mesh.pp_engine) else mesh.pp_engine
    p, where = mesh.pp, placement(config, mesh.pp)
    if name == "afab":
        stages = where.stages_of(rank)
        full = tuple((stage, m) for stage in stages)
        none = tuple((stage, 0) for stage in stages)
        less = tuple((stage, m - (stage == stages[-1])) for stage in stages)
        return frozenset({Moment(Op.F, stages[-1], less, none), Moment(Op.B, stages[-1], full, none)})
    enough = m % p + p * max(4, p)  # with more micro-batches no rank ever holds more
    return _named_moments(name, p, min(m, enough), where.v)[rank]


@lru_cache(maxsize=8)
def _named_moments(name: str, p: int, m: int, v: int) -> tuple[frozenset[Moment], ...]:
    """Made once: the estimate is asked for many micro-batch sizes."""
    return tuple(moments(actions) for actions in make_schedule(name, p=p, m=m, v=v).lists)


def _reduction_copies(specs: tuple[ParamSpec, ...], topology: Topology, rank: int) -> int:
    """Elements of the copies through which a CPU's gradients are summed over dp (trainer/comm.py)."""
    if topology.dp == 1:
        return 0
    layout = plan_layout(specs_on_rank(specs, rank), dp=topology.dp, tp=topology.tp, tp_rank=0)
    return sum(sorted((bucket.numel for bucket in layout.buckets), reverse=True)[:UNFINISHED_REDUCTIONS])


def usable_bytes(gpu: Gpu) -> int:
    """What a rank's tensors may take on one GPU."""
    return int((gpu.memory_bytes - FIXED_BYTES) * USABLE)


def largest_micro_batch(config: "Config", available_bytes: int, *, schedule: Schedule | None = None) -> int | None:
    """The largest micro_batch_size whose estimate fits `available_bytes`; None when not even 1 does.

    Memory grows linearly with the micro-batch, except for the loss chunk; so walk up by doubling, then bisect.
    """

    def is_fitting(size: int) -> bool:
        return rank_memory(config, micro_batch_size=size, schedule=schedule).total <= available_bytes

    if not is_fitting(1):
        return None
    fits, too_many = 1, 2
    while too_many <= 1 << 16 and is_fitting(too_many):
        fits, too_many = too_many, too_many * 2
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if is_fitting(middle):
            fits = middle
        else:
            too_many = middle
    return fits
