"""Learning rate and weight decay as pure functions of the step, the batch size as one of the samples consumed before.

`step` is 1-based: the number the update being made will have once it is complete, so `lr_at(1, …)` is the rate of the
first update. Nothing is remembered between steps, so a resumed run cannot be one step behind or apply a warm-up twice.

    peak        ┌───────────┐
               /             \\            linear, cosine or 1-sqrt
              /               \\______ floor
    0 ───────┴───────┴─────────┴──────▶ step
        warm-up  W   S       S + N

    step ≤ W           peak · step / W        (linear; the first update already moves; "constant": peak)
    W < step < S       peak                   (S = lr_decay_starting_step, default W)
    S ≤ step ≤ S + N   from peak to floor     (N = lr_decay_steps, default: what is left until train_steps)
    after              floor                  (min_decay_lr)

The style "constant" stays at the peak; with lr_decay_starting_step the others are warm-up, stable, decay (WSD). Weight
decay goes from its first value to the last of its schedule over steps S to S + N, by the same shapes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

CONSTANT = "constant"


class LrConfig(Protocol):
    """optimizer.learning_rate_scheduler of the config."""

    @property
    def learning_rate(self) -> float: ...
    @property
    def lr_warmup_steps(self) -> int: ...
    @property
    def lr_warmup_style(self) -> str: ...
    @property
    def lr_decay_style(self) -> str: ...
    @property
    def lr_decay_steps(self) -> int | None: ...
    @property
    def lr_decay_starting_step(self) -> int | None: ...
    @property
    def min_decay_lr(self) -> float: ...


def lr_at(step: int, config: LrConfig, *, train_steps: int) -> float:
    """The learning rate of update `step` (1-based)."""
    assert step >= 1
    peak, floor = config.learning_rate, config.min_decay_lr
    if step <= config.lr_warmup_steps:
        return peak if config.lr_warmup_style == "constant" else peak * step / config.lr_warmup_steps
    start = decay_start(config)
    if step < start or config.lr_decay_style == CONSTANT:
        return peak
    num_decay_steps = decay_steps(config, train_steps=train_steps)
    if step >= start + num_decay_steps:
        return floor
    return floor + (peak - floor) * remaining(config.lr_decay_style, (step - start) / num_decay_steps)


def decay_start(config: LrConfig) -> int:
    """The last step at the peak before the decay."""
    return config.lr_warmup_steps if config.lr_decay_starting_step is None else config.lr_decay_starting_step


def decay_steps(config: LrConfig, *, train_steps: int) -> int:
    """How many updates the decay takes; when the config leaves it open, it ends with the run."""
    if config.lr_decay_steps is not None:
        return config.lr_decay_steps
    return max(0, train_steps - decay_start(config))


def remaining(style: str, progress: float) -> float:
    """The part of (peak − floor) still on top of the floor; `progress` 0 → 1, 1 → 0. Raises ValueError."""
    match style:
        case "linear":
            return 1.0 - progress
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        case "1-sqrt":  # arXiv 2405.18392: the cool-down that ends lowest
            return 1.0 - math.sqrt(progress)
    raise ValueError(f"decay style {style!r}; known are linear, cosine and 1-sqrt")


class WeightDecayConfig(Protocol):
    """optimizer.weight_decay_schedule of the config."""

    @property
    def end_value(self) -> float: ...
    @property
    def style(self) -> str: ...
    @property
    def starting_step(self) -> int: ...
    @property
    def steps(self) -> int | None: ...


def weight_decay_at(step: int, first: float, schedule: WeightDecayConfig | None, *, train_steps: int) -> float:
    """The weight decay of update `step` (1-based): `first`, then by the schedule to its end value, up or down."""
    assert step >= 1
    if schedule is None or step <= schedule.starting_step:
        return first
    num_steps = weight_decay_steps(schedule, train_steps=train_steps)
    if step >= schedule.starting_step + num_steps:
        return schedule.end_value
    done = (step - schedule.starting_step) / num_steps
    return schedule.end_value + (first - schedule.end_value) * remaining(schedule.style, done)


def weight_decay_steps(schedule: WeightDecayConfig, *, train_steps: int) -> int:
    """How many updates the change takes; when the config leaves it open, it ends with the run."""
    return max(0, train_steps - schedule.starting_step) if schedule.steps is None else schedule.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """Steps that start at `from_samples` consumed samples or later train on `samples` samples over all dp ranks."""

    from_samples: int
    samples: int


def batch_size_at(consumed_samples: int, sizes: Sequence[BatchSize]) -> int:
    """Samples of the step that starts after `consumed_samples`; `sizes` in rising order from 0."""
    return next(size.samples for size in reversed(sizes) if size.from_samples <= consumed_samples)


def first_steps(sizes: Sequence[BatchSize]) -> tuple[int, ...]:
    """The first step (1-based) of each size; two are equal where a step jumps over a whole entry."""
    steps, consumed = [1], 0
    for size, following in pairwise(sizes):
        count = -(-max(0, following.from_samples - consumed) // size.samples)
        steps.append(steps[-1] + count)
        consumed += count * size.samples
    return tuple(steps)


def samples_before(step: int, sizes: Sequence[BatchSize]) -> int:
    """Samples consumed before update `step` (1-based), whether or not the updates before it moved anything."""
    borders = (*(min(first, step) for first in first_steps(sizes)), step)
    return sum(size.samples * (end - start) for size, (start, end) in zip(sizes, pairwise(borders), strict=True))
