"""How long a recovery took, in parts that add up: detection + teardown + back-off + interpreter start + load.

    fault ─detection─▶ detected ─teardown─▶ (back-off) ─▶ cycle_started ─start─▶ all ranks past INIT ─load─▶ step

Durations inside this process are monotonic; only detection, which begins on another machine, is a difference of unix
times, and None when nobody knows when the fault was.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, kw_only=True)
class Recovery:
    """An incident on its way to be recovered. All `*_at` are monotonic seconds."""

    incident: str
    cls: str
    level: str | None
    detection_s: float | None
    detected_at: float
    backoff_s: float
    reached_step: int | None

    def data(self, times: "CycleTimes", *, resumed_step: int) -> dict[str, Any]:
        """The data of the `recovered` event."""
        teardown_s = max(0.0, times.started_at - self.detected_at - self.backoff_s)
        parts = (self.detection_s or 0.0, teardown_s, self.backoff_s, times.start_s or 0.0, times.load_s or 0.0)
        lost = None if self.reached_step is None else max(0, self.reached_step - resumed_step)
        return {
            "incident": self.incident,
            "class": self.cls,
            "level": self.level,
            "detection_s": _rounded(self.detection_s),
            "teardown_s": _rounded(teardown_s),
            "backoff_s": _rounded(self.backoff_s),
            "start_s": _rounded(times.start_s),
            "load_s": _rounded(times.load_s),
            "total_s": _rounded(sum(parts)),
            "lost_steps": lost,
        }


@dataclass(slots=True, kw_only=True)
class CycleTimes:
    """When a cycle was started, when all its ranks were past INIT, when the first step was completed."""

    started_at: float
    loading_at: float | None = None
    running_at: float | None = None

    def note(self, now: float, *, all_started: bool, stepped: bool) -> bool:
        """Take in what is seen; True when the first completed step has just been seen."""
        if self.loading_at is None and (all_started or stepped):
            self.loading_at = now
        if self.running_at is not None or not stepped:
            return False
        self.running_at = now
        return True

    @property
    def start_s(self) -> float | None:
        return None if self.loading_at is None else self.loading_at - self.started_at

    @property
    def load_s(self) -> float | None:
        if self.loading_at is None or self.running_at is None:
            return None
        return self.running_at - self.loading_at


def furthest_step(reached: int | None, *, resumed: int | None) -> int | None:
    """The step that is lost down from: what a cycle reached, or what it had resumed from and could not load.

    None while it is not known how far the cycle came.
    """
    return None if reached is None else max(reached, resumed or 0)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
