"""The flat-bucket optimizer: gradient reduction, exact norm, update, weight gathering, for ZeRO-0 and ZeRO-1.

    grads ─(tie sites)─▶ reduce-scatter over dp ─▶ norm² of my shard ─▶ world sum, vote ─▶ clip ─▶ AdamW ─▶ all-gather

ZeRO-0 runs the same reduction and then gathers the summed gradients, so both stages compute the same bits. Reductions
may start bucket by bucket while backward still runs, and gathers are waited for where a weight is read (`overlap.py`).
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

import torch

from trainer.comm import Pending, all_reduce_in_order, start_all_gather, start_reduce_scatter
from trainer.device import Precision
from trainer.errors import ConfigError
from trainer.mesh.context import ParallelContext
from trainer.optim.adamw import AdamW
from trainer.optim.layout import STATES, Layout, Slot
from trainer.optim.norm import owned_ranges, owned_slots, square_sum
from trainer.optim.storage import BucketStorage, allocate
from trainer.spec import ParamSpec, block_name

# Reductions with memory of their own (gloo's) that may be under way at once; each takes a bucket's size.
MAX_UNFINISHED = 2


class FlatOptimizer:
    """Weights, gradients and AdamW state of one rank. Raises ConfigError for a ZeRO stage other than 0 or 1."""

    def __init__(
        self, specs: Sequence[ParamSpec], layout: Layout, ctx: ParallelContext, *, precision: Precision,
        zero_stage: int, adamw: AdamW,
    ) -> None:  # fmt: skip
        if zero_stage not in (0, 1):
            raise ConfigError(
                f"optimizer.zero_stage is {zero_stage}; set 0 or 1. Stages 2 and 3 would reduce-scatter gradients once "
                "per micro-batch under a pipeline, which costs more than they save."
            )
        self.specs = {spec.name: spec for spec in specs}
        self.blocks = tuple(dict.fromkeys(block_name(spec.name) for spec in specs))
        self.ctx, self.precision, self.zero_stage, self.adamw = ctx, precision, zero_stage, adamw
        dp_rank = ctx.get_dp_rank()
        self.storages = tuple(
            allocate(bucket, dp_rank=dp_rank, zero_stage=zero_stage, precision=precision, device=ctx.device)
            for bucket in layout.buckets
        )
        self._reducing: dict[int, Pending] = {}
        self._gathering: dict[int, Pending] = {}
        self._counted = tuple(
            owned_ranges(s.bucket, self.specs, shard=s.shard, pp_rank=ctx.get_pp_rank(), tp_rank=ctx.get_tp_rank())
            for s in self.storages
        )

    def view(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(weight, gradient) of a local parameter as views of its bucket. Raises KeyError if it is not here."""
        storage, slot = self._find(name)
        self.wait_weights([storage.bucket.index])
        part = slice(slot.start, slot.stop)
        return storage.weights[part].view(slot.local_shape), storage.grads[part].view(slot.local_shape)

    def zero_grads(self) -> None:
        """Gradients of a step that was given up may still be under way."""
        for pending in self._reducing.values():
            pending.wait()
        self._reducing.clear()
        for storage in self.storages:
            storage.grads.zero_()

    @property
    def sums_tp(self) -> frozenset[int]:
        """Buckets with gradients that tp ranks have in parts."""
        return frozenset(
            s.bucket.index
            for s in self.storages
            if any(self.specs[slot.name].tp_partial_grad for slot in s.bucket.slots)
        )

    def start_reduction(self, index: int) -> None:
        """Start to sum a bucket whose gradients are complete.

        Comm: 1 reduce-scatter (dp); before it, where the bucket holds partial gradients, 1 reduce-scatter and 1
        all-gather (tp), which are waited for.
        """
        storage = self.storages[index]
        partial = [slot for slot in storage.bucket.slots if self.specs[slot.name].tp_partial_grad]
        all_reduce_in_order([storage.grads[slot.start : slot.stop] for slot in partial], self.ctx.tp)
        unfinished = [pending for pending in self._reducing.values() if pending.finish is not None]
        if len(unfinished) >= MAX_UNFINISHED:
            unfinished[0].wait()
        self._reducing[index] = start_reduce_scatter(storage.grads, self.ctx.dp)

    def reduce_gradients(self) -> torch.Tensor:
        """Sum gradients over dp (and tp where they are partial); returns norm² of what this rank counts, fp64 scalar.

        Waits for the buckets that are on their way and starts the others. Afterwards the held part of `grads` is the
        global gradient. Comm: as `start_reduction` per bucket that has not started; under ZeRO-0 1 all-gather (dp) per
        bucket more.
        """
        for storage in self.storages:
            if storage.bucket.index not in self._reducing:
                self.start_reduction(storage.bucket.index)
        gathers = []
        for storage in self.storages:
            self._reducing.pop(storage.bucket.index).wait()
            if self.zero_stage == 0:
                gathers.append(start_all_gather(storage.grads, storage.grads[storage.shard], self.ctx.dp))
        for gather in gathers:
            gather.wait()
        total = torch.zeros((), dtype=torch.float64, device=self.ctx.device)
        for storage, counted in zip(self.storages, self._counted, strict=True):
            for part in counted:
                total += square_sum(storage.grads[part])
        return total

    def block_squares(self) -> torch.Tensor:
        """Norm² of what this rank counts of each of `blocks`, fp64; between `reduce_gradients` and `update`."""
        squares = torch.zeros(len(self.blocks), dtype=torch.float64, device=self.ctx.device)
        at = {block: index for index, block in enumerate(self.blocks)}
        mine = {"pp_rank": self.ctx.get_pp_rank(), "tp_rank": self.ctx.get_tp_rank()}
        for storage in self.storages:
            for slot, part in owned_slots(storage.bucket, self.specs, shard=storage.shard, **mine):
                squares[at[block_name(slot.name)]] += square_sum(storage.grads[part])
        return squares

    def update(self, *, lr: float, weight_decay: float, adam_t: int, scale: float) -> None:
        """One AdamW update with gradients times `scale`, then make live weights follow. Comm: see `publish`."""
        self.wait_weights()

        def group(storage: BucketStorage) -> tuple[float, float]:
            return storage.bucket.wd_mult, storage.bucket.lr_mult

        for (wd_mult, lr_mult), members in groupby(sorted(self.storages, key=group), key=group):
            storages = list(members)
            grads = [s.grads[s.held] for s in storages]
            if scale != 1.0:
                torch._foreach_mul_(grads, scale)
            self.adamw.step(storages, grads, lr=lr * lr_mult, weight_decay=weight_decay * wd_mult, adam_t=adam_t)
        self.publish()

    def publish(self) -> None:
        """Live weights from master: cast, then start to gather them over dp, those used first first.

        Whoever reads a live weight calls `wait_weights` before. Comm: under ZeRO-1 1 all-gather (dp) per bucket.
        """
        for storage in reversed(self.storages):
            if not self.precision.is_own_master:
                storage.weights[storage.held].copy_(storage.master)
            if self.zero_stage == 1:
                part = storage.weights[storage.shard]
                self._gathering[storage.bucket.index] = start_all_gather(storage.weights, part, self.ctx.dp)

    def wait_weights(self, buckets: Iterable[int] | None = None) -> None:
        """Wait until the live weights of these buckets (missing: of all) are whole."""
        for index in tuple(self._gathering) if buckets is None else buckets:
            pending = self._gathering.pop(index, None)
            if pending is not None:
                pending.wait()

    def load_weight(self, name: str, value: torch.Tensor) -> None:
        """Set a local parameter and its held part of master to `value` (local shape, master dtype)."""
        storage, slot = self._find(name)
        self.wait_weights([storage.bucket.index])
        flat = value.reshape(-1)
        storage.weights[slot.start : slot.stop].copy_(flat)
        start, stop = max(slot.start, storage.held.start), min(slot.stop, storage.held.stop)
        if start < stop:
            target = storage.master[start - storage.held.start : stop - storage.held.start]
            target.copy_(flat[start - slot.start : stop - slot.start])

    def state_shards(self) -> Mapping[tuple[str, int], torch.Tensor]:
        """(state, bucket index) → the held flat storage itself: under ZeRO-1 this dp rank's shard, else the bucket."""
        self.wait_weights()  # master may be a view of live weights
        return {(state, s.bucket.index): getattr(s, state) for s in self.storages for state in STATES}

    def _find(self, name: str) -> tuple[BucketStorage, Slot]:
        for storage in self.storages:
            for slot in storage.bucket.slots:
                if slot.name == name:
                    return storage, slot
        raise KeyError(name)
