"""Boxes: what a flat slice of a tensor is made of, and how one tiling is read through another.

A ZeRO shard owns a half-open range of a row-major d-dimensional tensor. Such a range is the disjoint union of at most
2d−1 axis-aligned boxes: in two dims the tail of a row, full rows, the head of a row.

    . . . . .          [7, 18) of a 4 × 5 tensor:
    . . a a a            a = row 1, columns 2–4
    b b b b b            b = row 2
    c c c . .            c = row 3, columns 0–2

So a rank writes its slice as rectangles of the tensor, without asking anybody, and a reader on any other mesh
intersects what it wants with what was written. Nothing here knows of ranks, files or torch.
"""

import math
from collections.abc import Iterable, Sequence

from trainer.spec import Box

__all__ = ["Box", "assert_exact_cover", "flat_range_boxes", "intersect", "shift", "volume", "whole"]


def volume(box: Box) -> int:
    """Elements of a box; 1 for the box of a scalar."""
    return math.prod(box.size)


def whole(shape: Sequence[int]) -> Box:
    """The box that is all of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def shift(box: Box, by: Sequence[int]) -> Box:
    """The same box, `by` further along each dim."""
    return Box(tuple(o + b for o, b in zip(box.offset, by, strict=True)), box.size)


def intersect(a: Box, b: Box) -> Box | None:
    """What two boxes of one tensor share, or None where that is nothing."""
    starts = tuple(max(x, y) for x, y in zip(a.offset, b.offset, strict=True))
    ends = tuple(min(ao + an, bo + bn) for ao, an, bo, bn in zip(a.offset, a.size, b.offset, b.size, strict=True))
    if any(end <= start for start, end in zip(starts, ends, strict=True)):
        return None
    return Box(starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """The boxes of elements [start, stop) of a row-major tensor, in storage order; at most 2d−1, each contiguous.

    The i-th box begins in storage where the one before ends, the first at `start`.
    """
    assert 0 <= start <= stop <= math.prod(shape)
    if start == stop:
        return ()
    if len(shape) <= 1:
        return (Box((start,), (stop - start,)) if shape else Box((), ()),)
    row_numel = math.prod(shape[1:])
    first, last = start // row_numel, (stop - 1) // row_numel
    if first == last:
        return _row_part(shape, first, start - first * row_numel, stop - first * row_numel)
    top = () if start % row_numel == 0 else _row_part(shape, first, start - first * row_numel, row_numel)
    bottom = () if stop % row_numel == 0 else _row_part(shape, last, 0, stop - last * row_numel)
    begin, end = first + bool(top), last + (not bottom)
    middle = (Box((begin, *(0 for _ in shape[1:])), (end - begin, *shape[1:])),) if begin < end else ()
    return top + middle + bottom


def _row_part(shape: Sequence[int], row: int, start: int, stop: int) -> tuple[Box, ...]:
    return tuple(Box((row, *box.offset), (1, *box.size)) for box in flat_range_boxes(shape[1:], start, stop))


def assert_exact_cover(target: Box, parts: Iterable[Box]) -> None:
    """Raise ValueError unless `parts` tile `target`: inside it, pairwise disjoint, volumes adding up."""
    tiles = sorted(parts, key=lambda box: box.offset)
    for tile in tiles:
        if intersect(target, tile) != tile:
            raise ValueError(f"{_show(tile)} reaches outside {_show(target)}")
    covered = sum(volume(tile) for tile in tiles)
    if covered != volume(target):
        raise ValueError(f"{covered:,} of {volume(target):,} elements of {_show(target)} are covered")
    clash = _overlap(tiles)
    if clash is not None:
        raise ValueError(f"{_show(clash[0])} and {_show(clash[1])} overlap")


def _overlap(tiles: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two tiles that share an element, or None. `tiles` are sorted by offset, so only those that reach are compared."""
    if not tiles or not tiles[0].size:
        return (tiles[0], tiles[1]) if len(tiles) > 1 else None
    open_tiles: list[Box] = []
    for tile in tiles:
        open_tiles = [other for other in open_tiles if other.offset[0] + other.size[0] > tile.offset[0]]
        for other in open_tiles:
            if intersect(other, tile) is not None:
                return other, tile
        open_tiles.append(tile)
    return None


def _show(box: Box) -> str:
    return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(box.offset, box.size, strict=True)) + "]"
