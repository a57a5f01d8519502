"""Which sample comes i-th: a pure function of the sources, their weights and the seed.

Weights are rounded once to whole shares of a block (2^20 draws, or a smaller power of two that holds the same
weights), a positive one never to zero. Inside a block, source i gets n_i draws at the stride keys (j+½)/n_i, and the
block is the sort of all keys. So the counts of a block are exact, and at every prefix of a block a source is within
½ + ½·w_i·(S−2) draws of its quota, S sources in all. Nothing is random about *which source*; *which sample* of it is
a keyed permutation per (source, epoch), so that a small source wraps into a new shuffle instead of ending.

    sample index ──stage──▶ block, place ──order──▶ source, draw number ──÷ n──▶ epoch, position ──Feistel──▶ index

Stages change sources and weights at a given sample. A source keeps counting over stages: none of its samples is
repeated or skipped at a border. After levanter's block-deterministic mixture (DESIGN §6).
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from trainer.data.feistel import permute_one, round_keys

MAX_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """From global sample `start` on, draw with these weights; one weight per source of the whole run (0: never)."""

    start: int
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One sample: the `index`-th of `source` (in stored order), drawn in its `epoch`-th pass, from 0."""

    source: int
    epoch: int
    index: int


def weight_problem(weights: Sequence[float]) -> str | None:
    """Why these weights cannot be used, or None."""
    if not weights:
        return "there is no weight"
    bad = [weight for weight in weights if not math.isfinite(weight) or weight < 0]
    if bad:
        return f"a weight must be a finite number ≥ 0, found {bad[0]}"
    return None if any(weight > 0 for weight in weights) else "all weights are 0: nothing could be drawn"


def block_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Draws per block of each source: weights rounded once, sum a power of two ≤ 2^20.

    Largest remainders are rounded up; a positive weight gets at least one draw, taken from the largest share. Raises
    ValueError for weights that `weight_problem` names.
    """
    problem = weight_problem(weights)
    if problem is not None:
        raise ValueError(problem)
    total = math.fsum(weights)
    exact = [weight / total * MAX_BLOCK for weight in weights]
    shares = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: (shares[i] - exact[i], i))
    for i in by_remainder[: MAX_BLOCK - sum(shares)]:
        shares[i] += 1
    for i, weight in enumerate(weights):
        if weight > 0 and shares[i] == 0:
            shares[i], shares[shares.index(max(shares))] = 1, max(shares) - 1
    common = math.gcd(*shares)
    return tuple(share // (common & -common) for share in shares)


@lru_cache(maxsize=16)
def block_order(shares: tuple[int, ...]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """(source, number among the source's draws of this block) of each place of a block; read-only arrays.

    A double tells any two different keys apart: they differ by at least 2^-42, and equal fractions divide to the same
    double. Ties go to the lower source.
    """
    sources = np.repeat(np.arange(len(shares), dtype=np.int32), shares)
    numbers = np.concatenate([np.arange(share, dtype=np.int32) for share in shares])
    keys = (2.0 * numbers + 1.0) / (2.0 * np.asarray(shares, dtype=np.float64)[sources])
    order = np.lexsort((sources, keys))
    placed = sources[order], numbers[order]
    for array in placed:
        array.setflags(write=False)
    return placed


class Mixture:
    """The order of all samples of a run. `num_samples[i]`: samples in one pass over source i."""

    def __init__(self, *, num_samples: Sequence[int], stages: Sequence[Stage], seed: int) -> None:
        """ValueError: a source is empty but has weight, weights are unusable, or stages are not in order from 0."""
        if not stages or stages[0].start != 0 or any(a.start >= b.start for a, b in itertools.pairwise(stages)):
            raise ValueError("the first stage must start at sample 0 and each later one after the one before")
        for stage in stages:
            if len(stage.weights) != len(num_samples):
                raise ValueError(f"{len(stage.weights)} weights for {len(num_samples)} sources")
            for source, weight in enumerate(stage.weights):
                if weight > 0 and num_samples[source] < 1:
                    raise ValueError(f"source {source} has a weight of {weight} but not one whole sample")
        self.num_samples = tuple(num_samples)
        self.seed = seed
        self.stages = tuple(stages)
        self.shares = tuple(block_shares(stage.weights) for stage in stages)
        self._drawn_before = self._counts_at_stage_starts()

    def _counts_at_stage_starts(self) -> tuple[tuple[int, ...], ...]:
        before = [tuple(0 for _ in self.num_samples)]
        for stage, following, shares in zip(self.stages, self.stages[1:], self.shares, strict=False):
            length = following.start - stage.start
            before.append(tuple(a + b for a, b in zip(before[-1], prefix_counts(shares, length), strict=True)))
        return tuple(before)

    def stage_of(self, sample: int) -> int:
        return max(i for i, stage in enumerate(self.stages) if stage.start <= sample)

    def sample(self, i: int) -> Draw:
        """The i-th sample of the run, i ≥ 0. A pure function: any i, any order, any number of times."""
        stage = self.stage_of(i)
        shares = self.shares[stage]
        sources, numbers = block_order(shares)
        block, place = divmod(i - self.stages[stage].start, len(sources))
        source = int(sources[place])
        drawn = self._drawn_before[stage][source] + block * shares[source] + int(numbers[place])
        epoch, position = divmod(drawn, self.num_samples[source])
        keys = round_keys(seed=self.seed, source=source, epoch=epoch)
        return Draw(source=source, epoch=epoch, index=permute_one(position, self.num_samples[source], keys))


def prefix_counts(shares: tuple[int, ...], length: int) -> tuple[int, ...]:
    """Draws of each source among the first `length` samples of a stage."""
    blocks, rest = divmod(length, sum(shares))
    sources, _ = block_order(shares)
    part = np.bincount(sources[:rest], minlength=len(shares))
    return tuple(blocks * share + int(extra) for share, extra in zip(shares, part, strict=True))
