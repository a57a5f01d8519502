"""Replica digests: ranks that must hold the same bits tell each other so, and a run whose copies differ stops.

    each rank   a 64-bit digest of each tensor that has a copy elsewhere
    all         a few summed digests from everybody      1 all-gather of some 30 bytes a rank
    on a miss   every digest from everybody              1 all-gather more, to name ranks and parameters

A digest is Σ words · weights mod 2^64 over the tensor's bits, so parts add up, and one code path serves every device.
Weights are odd and differ by place: each flipped bit and each pair of swapped elements changes the sum.

What it cannot see: a wrong bit that was there before it was copied. Under ZeRO-1 the owner of a shard passes its error
on to all replicas with the next gather.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from trainer.comm import all_gather
from trainer.errors import DesyncError
from trainer.mesh.context import ParallelContext
from trainer.optim.layout import STATES
from trainer.optim.storage import BucketStorage
from trainer.replicas import WEIGHT, Held, Part, Scope, describe, differences, is_equal, summary

if TYPE_CHECKING:
    from trainer.engine import Engine
    from trainer.optim.optimizer import FlatOptimizer

_ROW = 1 << 16
# Rows that are widened at once where memory is wide: a launch must be worth its while (128 MiB). On a CPU it is one,
# which stays in the cache.
_ROWS_AT_ONCE = 256


def check_replicas(engine: "Engine", *, step: int, scope: Scope) -> None:
    """Compare the copies of `scope` after `step` completed steps. Raises DesyncError on every rank if any differ.

    Reads live weights: gathers that are under way are waited for. Comm: 1 all-gather (world) where anything has
    copies, 1 more if they differ.
    """
    optimizer, ctx = engine.optimizer, engine.ctx
    # Where live weights are their own master, they are compared as weights.
    states = tuple(state for state in STATES if state != "master" or not optimizer.precision.is_own_master)
    held = Held(specs=engine.specs, topology=ctx.topology, states=states, zero_stage=optimizer.zero_stage, scope=scope)
    bundles = held.bundles()
    if not bundles:
        return
    mine = digests(optimizer, held.parts_on(ctx.rank))
    numbers = _gather(ctx, [summary(bundle, mine) for bundle in bundles])
    if is_equal(bundles, numbers):
        return
    found = differences(held, _all_digests(ctx, held, mine))
    suspects = tuple(sorted({rank for difference in found for rank in difference.suspects}))
    raise DesyncError(
        f"Replicas differ after step {step}: {describe(found)}. Copies must be equal bit for bit; this state is not "
        f"saved, training goes on from the checkpoint before. {_advice(suspects)}",
        suspects=suspects,
    )


def _advice(suspects: Sequence[int]) -> str:
    if not suspects:
        return "If it comes again, have the nodes of these ranks tested."
    one = len(suspects) == 1
    who = f"{'rank' if one else 'ranks'} {', '.join(map(str, suspects))}"
    return f"The node of {who} computed or kept something wrong: have it tested."


def digests(optimizer: "FlatOptimizer", parts: Sequence[Part]) -> dict[Part, int]:
    """The digest of each part that this rank holds. One wait for the device."""
    optimizer.wait_weights()
    places = {slot.name: (storage, slot) for storage in optimizer.storages for slot in storage.bucket.slots}
    sums = []
    for part in parts:
        storage, slot = places[part.name]
        flat, first = _held(storage, part.state)
        start, stop = max(slot.start, first), min(slot.stop, first + flat.numel())
        inside = flat[start - first : stop - first] if start < stop else flat[:0]
        sums.append(digest(inside, first=max(0, start - slot.start)))
    values: list[int] = torch.stack(sums).tolist() if sums else []
    return dict(zip(parts, values, strict=True))


def _held(storage: BucketStorage, state: str) -> tuple[torch.Tensor, int]:
    """A state's flat storage, and which element of the bucket is its first."""
    if state == WEIGHT:
        return storage.weights, 0
    flat: torch.Tensor = getattr(storage, state)
    return flat, storage.held.start


def digest(x: torch.Tensor, *, first: int = 0) -> torch.Tensor:
    """Σ words · weights of flat x as an int64 scalar on its device; x[0] is element `first` of the whole tensor."""
    words = x.detach().view(torch.int16 if x.element_size() == 2 else torch.int32)
    place = first * (words.numel() // max(1, x.numel()))
    weights = _weights(x.device)
    rows_at_once = 1 if x.device.type == "cpu" else _ROWS_AT_ONCE
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    at = 0
    while at < words.numel():
        row, column = divmod(place + at, _ROW)
        left = words.numel() - at
        n = min(left, _ROW - column) if column or left < _ROW else min(left // _ROW, rows_at_once) * _ROW
        rows = words[at : at + n].view(-1, min(n, _ROW)).to(torch.int64)
        sums = rows.mul_(weights[column : column + rows.shape[1]]).sum(1)
        total += sums.mul_(torch.arange(2 * row + 1, 2 * (row + len(sums)) + 1, 2, device=x.device)).sum()
        at += n
    return total


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """Odd numbers, one for each word of a row; the same on every rank and in every process."""
    drawn = np.random.Generator(np.random.Philox(key=1)).integers(0, 2**63, size=_ROW, dtype=np.int64)
    return torch.from_numpy(drawn | 1).to(device)


def _gather(ctx: ParallelContext, numbers: Sequence[int]) -> list[list[int]]:
    """Everybody's numbers, by rank; as many from each."""
    unsigned = np.array(numbers, dtype=object) % (1 << 64)
    mine = torch.from_numpy(unsigned.astype(np.uint64).view(np.int64)).to(ctx.device)
    everyone = torch.empty(len(numbers) * ctx.topology.world_size, dtype=torch.int64, device=ctx.device)
    rows: list[list[int]] = all_gather(everyone, mine, ctx.world).view(ctx.topology.world_size, -1).tolist()
    return rows


def _all_digests(ctx: ParallelContext, held: Held, mine: Mapping[Part, int]) -> list[dict[Part, int]]:
    """Every digest of every rank; a rank's parts follow from its place on the mesh."""
    parts = [held.parts_on(rank) for rank in range(ctx.topology.world_size)]
    longest = max(map(len, parts))
    rows = _gather(ctx, [*mine.values(), *[0] * (longest - len(mine))])
    return [dict(zip(own, row, strict=False)) for own, row in zip(parts, rows, strict=True)]
