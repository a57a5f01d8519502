"""Two clocks that are never mixed: unix time for people and records, monotonic time for durations and silence."""

import time
from typing import Protocol


class Clock(Protocol):
    """What code that waits or ages things asks for; tests pass one that they turn by hand."""

    def now_unix(self) -> float: ...

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """This machine's clocks."""

    def now_unix(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))
