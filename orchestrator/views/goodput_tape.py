"""The categories of wall time, and the tape that they are painted on.

The tape has one cursor and counts whole microseconds, so no moment is counted twice or left out, and the sum of the
categories equals the wall time exactly: end − begin, without the time in which a cancelled run was no run.
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
    DRAINED = "drained"
    PROVISIONAL = "provisional"


SETTLED = tuple(category for category in Category if category is not Category.PROVISIONAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Wall time of a run by category, in whole microseconds; `wall_us` is exactly the sum of `micros`.

    `starting_us`: the part of PROVISIONAL in which a cycle had not trained yet. `has_trained`: some step was seen.
    """

    begin_unix: float | None
    end_unix: float | None
    wall_us: int
    micros: dict[Category, int]
    rank_micros: dict[Category, int]
    starting_us: int = 0
    has_trained: bool = True

    def seconds(self, category: Category) -> float:
        return self.micros[category] / 1e6

    def rank_seconds(self, category: Category) -> float:
        return self.rank_micros[category] / 1e6

    @property
    def wall_s(self) -> float:
        return self.wall_us / 1e6

    @property
    def productive_ratio(self) -> float | None:
        """Productive and provisional work over wall time (0–1); None before the first step: no figure, not 0 %."""
        return self._work_us / self.wall_us if self.wall_us and self.has_trained else None

    @property
    def ettr(self) -> float | None:
        """Effective training time ratio: as productive_ratio, over wall time without the queue (0–1)."""
        run_us = self.wall_us - self.micros[Category.QUEUE]
        return self._work_us / run_us if run_us and self.has_trained else None

    @property
    def _work_us(self) -> int:
        return self.micros[Category.PRODUCTIVE] + self.micros[Category.PROVISIONAL] - self.starting_us


class Tape:
    """Time between two instants, each microsecond painted once: `to` paints from the cursor and moves it."""

    def __init__(self, begin_us: int | None) -> None:
        self._begin_us = begin_us
        self.cursor = begin_us or 0
        self.ranks = 0
        self.has_trained = False
        self._starting_us = self._away_us = 0
        self._micros = dict.fromkeys(Category, 0)
        self._rank_micros = dict.fromkeys(Category, 0)

    def to(self, us: int, category: Category) -> None:
        """Paint up to `us`; an instant that is already painted changes nothing."""
        if us > self.cursor:
            self._micros[category] += us - self.cursor
            self._rank_micros[category] += (us - self.cursor) * self.ranks
            self.cursor = us

    def start_to(self, us: int) -> None:
        """Paint a start whose parts are not known yet: provisional, but no work."""
        self._starting_us += max(0, us - self.cursor)
        self.to(us, Category.PROVISIONAL)

    def skip_to(self, us: int) -> None:
        """Leave the time up to `us` out: it belongs to no category and is no wall time."""
        self._away_us += max(0, us - self.cursor)
        self.cursor = max(self.cursor, us)

    def account(self) -> Account:
        begin = None if self._begin_us is None else self._begin_us / 1e6
        return Account(
            begin_unix=begin,
            end_unix=None if begin is None else self.cursor / 1e6,
            wall_us=self.cursor - (self._begin_us or 0) - self._away_us,
            micros=self._micros,
            rank_micros=self._rank_micros,
            starting_us=self._starting_us,
            has_trained=self.has_trained,
        )
