"""Who holds and who writes which box: pure arithmetic over (specs, layout, topology, rank, ZeRO stage).

    canonical tensor ──tp──▶ local tensor ──layout──▶ slot of a bucket ──dp──▶ this rank's part of the bucket

Read from right to left: the part that a rank stores of a slot is a flat range of the local tensor, the range is at
most 2d−1 boxes, the boxes are clipped where the local tensor is padding (a vocabulary that tp does not divide) and
moved to canonical coordinates. Nothing is asked of other ranks, so any rank can compute the index of all of them.

Each element is written once in the whole job, by the dp rank whose 1/dp share it falls in, also under ZeRO-0, where
every dp rank holds everything: so files of both stages cover the same boxes. Of tensors that tp does not cut, tp rank
0 writes; of tensors tied over pipeline ranks, the first of them; of context-parallel copies, cp rank 0.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from trainer.checkpoint.boxes import Box, flat_range_boxes, intersect, shift
from trainer.mesh.topology import Topology
from trainer.optim.layout import Bucket, Layout, Slot
from trainer.spec import ParamSpec, local_box


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One box of canonical tensor `name`, and where it lies in what the rank stores of `bucket`.

    Elements [start, start + prod(grid)) of the stored 1-D tensor, seen as `grid`, begin with the box: `box.size` is
    `grid` clipped where the local tensor is padding.
    """

    name: str
    box: Box
    bucket: int
    start: int
    grid: tuple[int, ...]


class _Array(Protocol):
    """What numpy arrays and torch tensors share."""

    def reshape(self, shape: tuple[int, ...], /) -> "_Array": ...
    def __getitem__(self, key: object, /) -> "_Array": ...


A = TypeVar("A")


def view(stored: A, piece: Piece) -> A:
    """The box of a piece as a view into the stored 1-D tensor of its bucket (numpy or torch)."""
    array: _Array = stored  # type: ignore[assignment]
    flat = array[piece.start : piece.start + math.prod(piece.grid)]
    return flat.reshape(piece.grid)[tuple(slice(0, n) for n in piece.box.size)]  # type: ignore[return-value]


def stored_range(bucket: Bucket, *, dp_rank: int, zero_stage: int) -> tuple[int, int]:
    """Elements of a bucket that a dp rank stores: its shard under ZeRO-1, all of it under ZeRO-0."""
    if zero_stage == 0:
        return 0, bucket.numel
    return dp_rank * bucket.shard_numel, (dp_rank + 1) * bucket.shard_numel


def held_boxes(
    specs: Sequence[ParamSpec], layout: Layout, topology: Topology, rank: int, zero_stage: int
) -> tuple[Piece, ...]:
    """Every box the rank stores, copies included: what a load must fill. `specs`: all of the model."""
    at = topology.coord(rank)
    by_name = {spec.name: spec for spec in specs}
    pieces: list[Piece] = []
    for bucket in layout.buckets:
        held = stored_range(bucket, dp_rank=at.dp, zero_stage=zero_stage)
        pieces += _pieces(by_name, bucket, topology, at.tp, wanted=held, base=held[0])
    return tuple(pieces)


def owned_boxes(
    specs: Sequence[ParamSpec], layout: Layout, topology: Topology, rank: int, zero_stage: int
) -> tuple[Piece, ...]:
    """The boxes the rank writes; over all ranks they tile every canonical tensor exactly."""
    at = topology.coord(rank)
    if at.cp != 0:
        return ()
    writes = {
        spec.name: spec for spec in specs if spec.pp_ranks[0] == at.pp and (spec.shard_dim is not None or at.tp == 0)
    }
    pieces: list[Piece] = []
    for bucket in layout.buckets:
        share = at.dp * bucket.shard_numel, (at.dp + 1) * bucket.shard_numel
        base, _ = stored_range(bucket, dp_rank=at.dp, zero_stage=zero_stage)
        pieces += _pieces(writes, bucket, topology, at.tp, wanted=share, base=base)
    return tuple(sorted(pieces, key=lambda piece: (piece.name, piece.box.offset)))


def _pieces(
    specs: Mapping[str, ParamSpec],
    bucket: Bucket,
    topology: Topology,
    tp_rank: int,
    *,
    wanted: tuple[int, int],
    base: int,
) -> Iterator[Piece]:
    """The boxes of elements `wanted` of a bucket that belong to one of `specs`."""
    for slot in bucket.slots:
        start, stop = max(slot.start, wanted[0]), min(slot.stop, wanted[1])
        if slot.name in specs and start < stop:
            yield from _slot_pieces(specs[slot.name], slot, bucket.index, topology, tp_rank, start, stop, base)


def _slot_pieces(
    spec: ParamSpec, slot: Slot, bucket: int, topology: Topology, tp_rank: int, start: int, stop: int, base: int
) -> Iterator[Piece]:
    canonical = local_box(spec, topology.tp, tp_rank)
    unpadded = Box((0,) * len(canonical.size), canonical.size)
    at = start - base
    for box in flat_range_boxes(slot.local_shape, start - slot.start, stop - slot.start):
        real = intersect(box, unpadded)
        if real is not None:
            assert real.offset == box.offset, "padding lies at the end of a dim"
            yield Piece(name=spec.name, box=shift(real, canonical.offset), bucket=bucket, start=at, grid=box.size)
        at += math.prod(box.size)
