"""What a row of bench.json is, and how two things are timed against each other.

Each ratio of times (ours ÷ other) is the median of alternating pairs, so that a change of the machine's mood hits both
sides; a spread (max − min of the pairs' ratios, over the median) above 20 % is said. A side of a pair is the fastest of
three turns (of up to ten where a turn takes a tenth of a second), which alternate too: another process on the core can
only add time, and adds it to either side. The process stays on one core and collects no garbage while it is timed.
"""

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SPREAD_LIMIT = 0.20
TURNS, MOST_TURNS = 3, 10


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of bench.json. For plain timings `other` is the limit in seconds and `ratio` ours ÷ limit."""

    id: str
    what: str
    ours: float
    other: float
    ratio: float
    spread: float
    shape: str
    threads: int


@contextmanager
def steady() -> Iterator[None]:
    """One core for this process and its children, and no garbage collection, until the block ends."""
    cores = os.sched_getaffinity(0)
    gc.collect()
    gc.disable()
    os.sched_setaffinity(0, {max(cores)})  # the last: interrupts are mostly served by the first
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        gc.enable()


def fastest(*functions: Callable[[], object], turns: int = TURNS) -> tuple[float, ...]:
    """Seconds of each function, the fastest of `turns` turns in which they alternate."""
    every = [[timed(function) for function in functions] for _ in range(turns)]
    return tuple(min(times) for times in zip(*every, strict=True))


def turns_for(seconds: float) -> int:
    """Turns that take about a second together, within bounds: a short one is the easier to disturb."""
    return min(MOST_TURNS, max(TURNS, round(1 / seconds)))


def timed(function: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def in_pairs(ours: Callable[[], object], other: Callable[[], object], pairs: int) -> list[tuple[float, float]]:
    """(seconds of ours, of other) of each pair, after a warm-up as long as a pair."""
    with steady():
        for function in (ours, other) * TURNS:
            function()
        times = [fastest(ours, other) for _ in range(pairs)]
    return [(mine, theirs) for mine, theirs in times]


def spread_of(values: Sequence[float]) -> float:
    """(max − min) over the median."""
    return (max(values) - min(values)) / statistics.median(values)
