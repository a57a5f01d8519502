"""The covering array holds every legal pair, whatever the axes and whatever is forbidden."""

from itertools import product

from dist.covering import cover, pairs_of
from hypothesis import given
from hypothesis import strategies as st

SIZES = st.lists(st.integers(1, 4), min_size=2, max_size=5)


@given(SIZES, st.sets(st.integers(0, 4**5 - 1), max_size=200), st.integers(1, 4))
def test_every_pair_that_some_legal_row_holds_is_covered(
    sizes: list[int], forbidden: set[int], candidates: int
) -> None:
    axes = {f"axis{i}": tuple(range(n)) for i, n in enumerate(sizes)}
    every = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    legal = [row for place, row in enumerate(every) if place not in forbidden]
    rows = cover(axes, legal.__contains__, depth=len(axes), candidates=candidates)
    assert all(row in legal and list(row) == list(axes) for row in rows)
    assert {pair for row in rows for pair in pairs_of(row)} == {pair for row in legal for pair in pairs_of(row)}
    assert rows == cover(axes, legal.__contains__, depth=len(axes), candidates=candidates)


def test_it_is_much_smaller_than_the_product() -> None:
    axes = {f"axis{i}": (0, 1, 2) for i in range(10)}
    assert len(cover(axes, lambda row: True)) <= 21  # 59,049 in the product, 9 at least
