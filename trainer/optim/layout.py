"""Where each local parameter lies in the flat buckets, and which part each dp rank owns. Pure.

A bucket is one contiguous span, padded so that dp equal shards fit. Parameters fill buckets in reverse canonical order
(the last layer's gradients are ready first) and may cross shard borders. A bucket holds one optimizer group only, so
one fused update serves it.

    bucket 0   │ lm_head │ L1.down │ L1.up … │pad│      dp rank r owns [r·shard_numel, (r+1)·shard_numel)
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer.mesh.topology import Topology
from trainer.spec import ParamSpec, local_shape, specs_on_rank

# Slots and shards start on multiples of this many elements: no element is ever in the scalar tail of a vectorised
# kernel, whose rounding may differ, so an update gives the same bits wherever the layout puts a parameter.
ALIGN = 64

DEFAULT_BUCKET_NUMEL = 1 << 24

STATES = ("master", "exp_avg", "exp_avg_sq")
"""What the optimizer keeps of each parameter and a checkpoint saves; compute-dtype weights are a cast of master."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Elements [start, stop) of a bucket hold the local tensor of canonical name `name`, row-major."""

    name: str
    start: int
    stop: int
    local_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One span of `numel` elements = dp · `shard_numel`; the gaps between slots hold zeros for ever."""

    index: int
    slots: tuple[Slot, ...]
    numel: int
    shard_numel: int
    wd_mult: float
    lr_mult: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All buckets of one rank, whatever stages it has. Equal on all dp and tp ranks of a pipeline rank."""

    buckets: tuple[Bucket, ...]

    def find(self, name: str) -> tuple[Bucket, Slot]:
        """The place of a parameter; raises KeyError if this rank does not hold it."""
        for bucket in self.buckets:
            for slot in bucket.slots:
                if slot.name == name:
                    return bucket, slot
        raise KeyError(name)


def plan_layout(
    local_specs: Sequence[ParamSpec],
    *,
    dp: int,
    tp: int,
    tp_rank: int,
    bucket_numel: int = DEFAULT_BUCKET_NUMEL,
) -> Layout:
    """Place the parameters of one rank. A parameter larger than `bucket_numel` gets a bucket of its own size."""
    buckets = [
        _bucket(index, group, dp=dp, tp=tp, tp_rank=tp_rank)
        for index, group in enumerate(_group(local_specs, tp=tp, tp_rank=tp_rank, bucket_numel=bucket_numel))
    ]
    return Layout(buckets=tuple(buckets))


def plan_rank_layout(
    specs: Sequence[ParamSpec], topology: Topology, rank: int, *, bucket_numel: int = DEFAULT_BUCKET_NUMEL
) -> Layout:
    """The layout of any global rank, computable by every rank."""
    at = topology.coord(rank)
    return plan_layout(
        specs_on_rank(specs, at.pp), dp=topology.dp, tp=topology.tp, tp_rank=at.tp, bucket_numel=bucket_numel
    )


def _group(specs: Sequence[ParamSpec], *, tp: int, tp_rank: int, bucket_numel: int) -> Iterator[list[ParamSpec]]:
    """Runs of specs that share wd_mult and lr_mult and fit a bucket, groups in order of first appearance."""
    keys = dict.fromkeys((spec.wd_mult, spec.lr_mult) for spec in reversed(specs))
    for key in keys:
        members: list[ParamSpec] = []
        total = 0
        for spec in reversed(specs):
            if (spec.wd_mult, spec.lr_mult) != key:
                continue
            numel = _aligned(math.prod(local_shape(spec, tp, tp_rank)))
            if members and total + numel > bucket_numel:
                yield members
                members, total = [], 0
            members.append(spec)
            total += numel
        yield members


def _bucket(index: int, members: list[ParamSpec], *, dp: int, tp: int, tp_rank: int) -> Bucket:
    slots: list[Slot] = []
    start = 0
    for spec in members:
        shape = local_shape(spec, tp, tp_rank)
        slots.append(Slot(name=spec.name, start=start, stop=start + math.prod(shape), local_shape=shape))
        start = _aligned(slots[-1].stop)
    shard_numel = _aligned(-(-start // dp))
    return Bucket(
        index=index,
        slots=tuple(slots),
        numel=dp * shard_numel,
        shard_numel=shard_numel,
        wd_mult=members[0].wd_mult,
        lr_mult=members[0].lr_mult,
    )


def _aligned(numel: int) -> int:
    return -(-numel // ALIGN) * ALIGN
