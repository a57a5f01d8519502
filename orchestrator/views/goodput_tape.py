"""The categories of wall time, and the tape that they are painted on.

The tape has one cursor and counts whole microseconds, so no moment is counted twice or left out, and the sum of the
categories equals end − begin exactly.
"""

from dataclasses import dataclass
from enum import StrEnum


class Category(StrEnum):
    """What a moment of wall time was spent on."""

    PRODUCTIVE = "productive"
    RECOMPUTE = "recompute"
    QUEUE = "queue"
    START = "start"
    PREFLIGHT = "preflight"
    RENDEZVOUS = "rendezvous"
    RESTORE = "restore"
    COMPILE = "compile"
    SAVE_BLOCKING = "save_blocking"
    DATA_STALL = "data_stall"
    EVAL = "eval"
    HANG = "hang"
    RECOVERY = "recovery"
    BACKOFF = "backoff"
    HELD = "held"
    PROVISIONAL = "provisional"


SETTLED = tuple(category for category in Category if category is not Category.PROVISIONAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Wall time of a run by category, in whole microseconds; `wall_us` is exactly the sum of `micros`."""

    begin_unix: float | None
    end_unix: float | None
    wall_us: int
    micros: dict[Category, int]
    rank_micros: dict[Category, int]

    def seconds(self, category: Category) -> float:
        return self.micros[category] / 1e6

    def rank_seconds(self, category: Category) -> float:
        return self.rank_micros[category] / 1e6

    @property
    def wall_s(self) -> float:
        return self.wall_us / 1e6

    @property
    def productive_ratio(self) -> float | None:
        """Productive and provisional work over wall time (0–1); None while no time has passed."""
        work = self.micros[Category.PRODUCTIVE] + self.micros[Category.PROVISIONAL]
        return work / self.wall_us if self.wall_us else None

    @property
    def ettr(self) -> float | None:
        """Effective training time ratio: as productive_ratio, over wall time without the queue (0–1)."""
        run_us = self.wall_us - self.micros[Category.QUEUE]
        work = self.micros[Category.PRODUCTIVE] + self.micros[Category.PROVISIONAL]
        return work / run_us if run_us else None


class Tape:
    """Time between two instants, each microsecond painted once: `to` paints from the cursor and moves it."""

    def __init__(self, begin_us: int | None) -> None:
        self._begin_us = begin_us
        self.cursor = begin_us or 0
        self.ranks = 0
        self._micros = dict.fromkeys(Category, 0)
        self._rank_micros = dict.fromkeys(Category, 0)

    def to(self, us: int, category: Category) -> None:
        """Paint up to `us`; an instant that is already painted changes nothing."""
        if us > self.cursor:
            self._micros[category] += us - self.cursor
            self._rank_micros[category] += (us - self.cursor) * self.ranks
            self.cursor = us

    def account(self) -> Account:
        begin = None if self._begin_us is None else self._begin_us / 1e6
        return Account(
            begin_unix=begin,
            end_unix=None if begin is None else self.cursor / 1e6,
            wall_us=self.cursor - (self._begin_us or 0),
            micros=self._micros,
            rank_micros=self._rank_micros,
        )
