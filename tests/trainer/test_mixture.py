"""The order of samples: exact per block, close to the quota at every prefix, nothing lost or repeated, pure."""

import math
from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.mixture import MAX_BLOCK, Mixture, Stage, block_order, block_shares, prefix_counts

WEIGHTS = st.lists(st.sampled_from([0.0, 0.001, 0.1, 0.25, 0.5, 1.0, 3.0]), min_size=1, max_size=5).filter(any)


def mixture(num_samples, weights, *, seed=1):
    return Mixture(num_samples=num_samples, stages=[Stage(start=0, weights=tuple(weights))], seed=seed)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=8).filter(any))
def test_weights_are_rounded_once_and_a_positive_one_never_to_zero(weights):
    shares = block_shares(weights)
    block = sum(shares)
    assert block & (block - 1) == 0 and block <= MAX_BLOCK
    for share, weight in zip(shares, weights, strict=True):
        assert (share > 0) == (weight > 0)
        assert abs(share / block - weight / math.fsum(weights)) <= len(weights) / MAX_BLOCK


@pytest.mark.parametrize(
    ("weights", "shares"),
    [([1, 1], (1, 1)), ([0.75, 0.25], (3, 1)), ([1, 0], (1, 0)), ([5], (1,)), ([1, 1, 2], (1, 1, 2))],
)
def test_the_block_is_the_smallest_power_of_two_that_holds_the_weights(weights, shares):
    assert block_shares(weights) == shares


@pytest.mark.parametrize("weights", [[], [0, 0], [1, -1], [1, math.nan], [math.inf, 1]])
def test_unusable_weights_are_refused(weights):
    with pytest.raises(ValueError, match="weight"):
        block_shares(weights)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(lambda w: sum(w) > 0))
def test_a_block_is_exact_and_every_prefix_is_within_the_bound(weights):
    shares = block_shares(weights)
    sources, numbers = block_order(shares)
    assert np.bincount(sources, minlength=len(shares)).tolist() == list(shares)
    num_drawn = sum(share > 0 for share in shares)
    places = np.arange(1, len(sources) + 1)
    for source, share in enumerate(shares):
        mine = sources == source
        assert numbers[mine].tolist() == list(range(share))
        weight = share / len(sources)
        off = np.abs(np.cumsum(mine) - weight * places).max()
        assert off <= 0.5 + 0.5 * weight * max(0, num_drawn - 2) + 1e-9


def test_two_equal_sources_with_a_tiny_weight_wrap_and_never_run_past_the_end():
    drawn = mixture((3, 3), (0.001, 0.999))
    counts = Counter()
    for i in range(5000):
        draw = drawn.sample(i)
        counts[draw.source] += 1
        assert 0 <= draw.index < 3
        assert abs(counts[0] - 0.001 * (i + 1)) <= 1
    assert drawn.sample(4999).epoch > 1000


def test_each_epoch_holds_every_sample_once_in_another_order():
    drawn = mixture((50, 7), (0.5, 0.5))
    seen = {}
    for i in range(400):
        draw = drawn.sample(i)
        seen.setdefault((draw.source, draw.epoch), []).append(draw.index)
    full = [indices for (source, _), indices in seen.items() if source == 1 and len(indices) == 7]
    assert len(full) > 20 and all(sorted(indices) == list(range(7)) for indices in full)
    assert len({tuple(indices) for indices in full}) > 15
    assert sorted(seen[0, 0]) == list(range(50))


def test_sources_of_one_size_are_shuffled_each_in_its_own_order():
    drawn = mixture((50, 50), (0.5, 0.5))
    draws = [drawn.sample(i) for i in range(100)]
    first, second = ([draw.index for draw in draws if draw.source == source] for source in (0, 1))
    assert sorted(first) == sorted(second) and sum(a == b for a, b in zip(first, second, strict=True)) < 10


def test_weight_zero_is_never_drawn_and_may_be_empty():
    drawn = mixture((10, 0), (1, 0))
    assert {drawn.sample(i).source for i in range(100)} == {0}


def test_any_sample_in_any_order_any_number_of_times():
    forward, backward = mixture((100, 30), (0.7, 0.3)), mixture((100, 30), (0.7, 0.3))
    ids = list(range(200))
    assert [forward.sample(i) for i in ids] == [backward.sample(i) for i in reversed(ids)][::-1]
    assert [forward.sample(i) for i in ids] != [mixture((100, 30), (0.7, 0.3), seed=2).sample(i) for i in ids]


@pytest.mark.parametrize(("start", "later"), list(product((1, 37, 128), ((0.2, 0.8, 0.0), (0.0, 0.5, 0.5), (1, 0, 0)))))
def test_a_stage_border_neither_repeats_nor_skips_inside_a_source(start, later):
    stages = [Stage(start=0, weights=(0.6, 0.4, 0.0)), Stage(start=start, weights=later)]
    drawn = Mixture(num_samples=(11, 23, 5), stages=stages, seed=3)
    by_source = {0: [], 1: [], 2: []}
    for i in range(300):
        draw = drawn.sample(i)
        by_source[draw.source].append((draw.epoch, draw.index))
    for source, size in enumerate((11, 23, 5)):
        draws = by_source[source]
        assert [epoch for epoch, _ in draws] == [k // size for k in range(len(draws))]
        assert len(set(draws)) == len(draws)
    counts = prefix_counts(block_shares((0.6, 0.4, 0.0)), start)
    assert [sum(drawn.sample(i).source == s for i in range(start)) for s in range(3)] == list(counts)


@pytest.mark.parametrize(
    ("num_samples", "stages"),
    [
        ((1, 1), [Stage(start=1, weights=(1, 1))]),
        ((1, 1), [Stage(start=0, weights=(1, 1)), Stage(start=0, weights=(1, 1))]),
        ((1,), [Stage(start=0, weights=(1, 1))]),
        ((1, 0), [Stage(start=0, weights=(1, 1))]),
        ((1, 1), []),
    ],
)
def test_stages_that_cannot_be_drawn_are_refused(num_samples, stages):
    with pytest.raises(ValueError):
        Mixture(num_samples=num_samples, stages=stages, seed=0)
