"""Boxes tile what they say they tile, whatever the shape and the range."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.checkpoint.boxes import Box, assert_exact_cover, flat_range_boxes, intersect, shift, volume, whole

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def shape_and_cuts(draw):
    shape = draw(SHAPES)
    numel = math.prod(shape)
    cuts = draw(st.lists(st.integers(0, numel), max_size=4))
    return shape, sorted({0, numel, *cuts})


def cells(box):
    return tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))


@settings(max_examples=50, deadline=None)
@given(shape_and_cuts())
def test_a_flat_range_is_at_most_2d_minus_1_boxes_that_hold_exactly_its_elements_in_storage_order(case):
    shape, cuts = case
    storage = np.arange(math.prod(shape)).reshape(shape)
    for start, stop in itertools.pairwise(cuts):
        boxes = flat_range_boxes(shape, start, stop)
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        held = np.concatenate([storage[cells(box)].reshape(-1) for box in boxes])
        assert held.tolist() == list(range(start, stop))


@settings(max_examples=50, deadline=None)
@given(shape_and_cuts())
def test_the_boxes_of_all_ranges_cover_the_tensor_exactly(case):
    shape, cuts = case
    boxes = [box for start, stop in itertools.pairwise(cuts) for box in flat_range_boxes(shape, start, stop)]
    assert_exact_cover(whole(shape), boxes)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_intersect_holds_exactly_the_shared_cells(data):
    shape = (5, 4, 3)

    def box():
        offset = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
        return Box(offset, tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True)))

    a, b = box(), box()
    grid = np.zeros(shape, int)
    grid[cells(a)] += 1
    grid[cells(b)] += 1
    shared = intersect(a, b)
    assert (grid == 2).sum() == (0 if shared is None else volume(shared))
    assert shared is None or (grid[cells(shared)] == 2).all()
    assert shared == intersect(b, a)


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([Box((0, 0), (2, 3))], "6 of 12"),
        ([Box((0, 0), (4, 3)), Box((1, 1), (1, 1))], "13 of 12"),
        ([Box((0, 0), (2, 3)), Box((1, 0), (2, 3))], "overlap"),
        ([Box((0, 0), (5, 3))], "outside"),
        ([], "0 of 12"),
    ],
)
def test_holes_overlaps_and_excess_are_refused(parts, why):
    with pytest.raises(ValueError, match=why):
        assert_exact_cover(Box((0, 0), (4, 3)), parts)


def test_shift_moves_a_box_and_keeps_its_size():
    assert shift(Box((1, 2), (3, 4)), (10, 20)) == Box((11, 22), (3, 4))
