"""Validation: one forward-only pass over the fixed held-out sets, a set of its own for each source.

Nothing of the training is touched: no weight, no gradient, no position in the data, no state of a generator. So the
same weights give the same loss whenever it is measured, and training goes on as if it had not been.
"""

import math
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from trainer.beat import BeatWriter, Phase
from trainer.data.batch import StepBatch
from trainer.data.loader import HeldOut
from trainer.records import SourceLoss, ValidationLine


class Evaluates(Protocol):
    """The part of an engine that validation uses."""

    @property
    def collective_seq(self) -> int: ...

    def eval_loss(self, batch: StepBatch) -> tuple[float, int]: ...


class HoldsOut(Protocol):
    """The part of a loader that validation uses."""

    @property
    def held_out(self) -> Sequence[HeldOut]: ...

    def validation_batches(self) -> Iterator[tuple[int, StepBatch]]: ...


def validate(engine: Evaluates, loader: HoldsOut, beats: BeatWriter, *, step: int) -> ValidationLine:
    """The held-out losses after `step`, as a line for the journal. A beat (phase EVAL) for every batch.

    Comm: collective over the world; every rank gets the same line, but for its time.
    """
    beats.beat(Phase.EVAL)
    began = time.perf_counter()
    sums, counts = [0.0] * len(loader.held_out), [0] * len(loader.held_out)
    for source, batch in loader.validation_batches():
        loss_sum, num_valid = engine.eval_loss(batch)
        sums[source] += loss_sum
        counts[source] += num_valid
        beats.beat(collective_seq=engine.collective_seq)
    loss, stats = _mean(math.fsum(sums), sum(counts)), beats.stats
    stats.validation_passes_total += 1
    stats.validation_seconds_total += time.perf_counter() - began
    stats.validation_loss = loss
    beats.publish_stats()
    return ValidationLine(
        step=step,
        loss=loss,
        num_valid=sum(counts),
        num_samples=sum(held.num_samples for held in loader.held_out),
        sources=tuple(
            SourceLoss(source=held.folder, loss=_mean(total, count), num_valid=count, num_samples=held.num_samples)
            for held, total, count in zip(loader.held_out, sums, counts, strict=True)
        ),
        unix=time.time(),
    )


def _mean(total: float, count: int) -> float:
    return total / count if count else math.nan
