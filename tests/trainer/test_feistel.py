"""The computed shuffle is a bijection for every size, depends on every part of its key, and looks shuffled."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.feistel import permute, permute_one, round_keys


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**63 - 1), st.integers(0, 50), st.integers(0, 10**6))
def test_it_is_a_bijection_of_its_range(n, seed, source, epoch):
    keys = round_keys(seed=seed, source=source, epoch=epoch)
    assert sorted(permute(np.arange(n), n, keys).tolist()) == list(range(n))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 2**61), st.data())
def test_one_and_many_positions_agree(n, data):
    keys = round_keys(seed=1, source=2, epoch=3)
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=5))
    many = permute(np.asarray(positions), n, keys).tolist()
    assert many == [permute_one(position, n, keys) for position in positions]
    assert all(0 <= place < n for place in many)


def test_another_seed_source_or_epoch_is_another_order():
    keys = [round_keys(seed=s, source=o, epoch=e) for s, o, e in ((1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1))]
    orders = [permute(np.arange(1000), 1000, key) for key in keys]
    for i, a in enumerate(orders):
        for b in orders[:i]:
            assert (a == b).sum() < 15  # two random orders agree in 1 place on average


def test_neighbours_are_scattered():
    n = 100_000
    order = permute(np.arange(n), n, round_keys(seed=42, source=0, epoch=0)).astype(float)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.01
    assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 0.01


def test_the_order_is_the_same_in_every_release():
    keys = round_keys(seed=42, source=0, epoch=0)
    assert permute(np.arange(10), 10, keys).tolist() == GOLDEN


GOLDEN = [9, 3, 4, 1, 8, 2, 6, 0, 7, 5]
