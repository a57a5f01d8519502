"""Pairwise covering arrays: few rows in which every legal pair of values of any two axes occurs. Pure.

Faults of a parallel trainer come from two options that meet: a tied embedding and a pipeline, ZeRO and an odd bucket.
The full product of the options has a hundred thousand rows; all pairs fit into some thirty. Greedy, as in Cohen et al.,
"The AETG system", IEEE TSE 23 (7), 1997.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def cover(
    axes: Mapping[str, Sequence[Any]],
    is_legal: Callable[[Row], bool],
    *,
    depth: int = 2,
    candidates: int = 12,
    start: Sequence[Row] = (),
) -> list[Row]:
    """Rows (axis → value) so that every legal pair is in one of them; the same rows at every call.

    A pair is legal if some legal row holds it that differs from the axes' first values in at most `depth` other axes.
    `start`: rows that are there anyway and come first, also ones with values that are not in `axes`. Greedy: each new
    row is the best of `candidates` built around the first pair still missing; more give fewer rows.
    """
    rows = list(start)
    missing = dict.fromkeys(all_pairs(axes))
    for row in rows:
        _strike(missing, row)
    rng = random.Random(0)
    while missing:
        pair = next(iter(missing))
        known = _complete(axes, dict(pair), is_legal, depth)
        if known is None:
            del missing[pair]
            continue
        tries = [_grow(axes, known, dict(pair), is_legal, missing, rng) for _ in range(candidates)]
        best = max(tries, key=lambda row: _gain(missing, row))
        rows.append(best)
        _strike(missing, best)
    return rows


def all_pairs(axes: Mapping[str, Sequence[Any]]) -> Iterator[Pair]:
    """Every pair of values of two different axes, legal or not."""
    for (a, left), (b, right) in itertools.combinations(axes.items(), 2):
        yield from (((a, x), (b, y)) for x, y in itertools.product(left, right))


def pairs_of(row: Row) -> Iterator[Pair]:
    """The pairs that stand in one row."""
    return itertools.combinations(row.items(), 2)


def _complete(axes: Mapping[str, Sequence[Any]], fixed: Row, is_legal: Callable[[Row], bool], depth: int) -> Row | None:
    """A legal row with `fixed` in it and as few other values away from the first of their axis as can be."""
    row = {name: fixed.get(name, values[0]) for name, values in axes.items()}
    free = [name for name in axes if name not in fixed]
    for changes in range(depth + 1):
        for names in itertools.combinations(free, min(changes, len(free))):
            for values in itertools.product(*(axes[name][1:] for name in names)):
                candidate = {**row, **dict(zip(names, values, strict=True))}
                if is_legal(candidate):
                    return candidate
    return None


def _grow(
    axes: Mapping[str, Sequence[Any]], base: Row, fixed: Row, is_legal: Callable[[Row], bool],
    missing: Mapping[Pair, None], rng: random.Random,
) -> Row:  # fmt: skip
    """Leave the legal row `base` axis by axis, in random order, for the legal value that strikes most missing pairs."""
    order = {name: place for place, name in enumerate(axes)}
    row, settled = dict(base), dict(fixed)
    names = [name for name in axes if name not in fixed]
    rng.shuffle(names)
    for name in names:
        choices = list(axes[name])
        rng.shuffle(choices)
        choices.sort(key=lambda value: -_gain_of(missing, settled, name, value, order))
        row[name] = next(v for v in choices if v == row[name] or is_legal({**row, name: v}))
        settled[name] = row[name]
    return row


def _gain_of(missing: Mapping[Pair, None], row: Row, name: str, value: Any, order: Mapping[str, int]) -> int:
    """Missing pairs that `value` makes with what is settled."""
    mine = (name, value)
    return sum(((mine, other) if order[name] < order[other[0]] else (other, mine)) in missing for other in row.items())


def _gain(missing: Mapping[Pair, None], row: Row) -> int:
    return sum(pair in missing for pair in pairs_of(row))


def _strike(missing: dict[Pair, None], row: Row) -> None:
    for pair in pairs_of(row):
        missing.pop(pair, None)
