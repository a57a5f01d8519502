"""Is the run directory still there? Someone may remove, move or replace it while the run trains.

A file system that does not answer, or answers strangely, is no proof: only a clear "no such file", several times in a
row and over some seconds, is taken for the end of a run directory. Everything else is unknown.
"""

import os
from dataclasses import dataclass
from enum import StrEnum

from orchestrator.errors import PawlError
from orchestrator.state.rundir import RunPaths

GONE_LOOKS = 3
GONE_S = 3.0


class Presence(StrEnum):
    """What one look found. UNKNOWN: the file system gave no clear answer."""

    HERE = "here"
    GONE = "gone"
    UNKNOWN = "unknown"


class RunDirGone(PawlError):
    """The run directory was removed, moved or replaced under a running attempt."""

    def __init__(self, paths: RunPaths, attempt: int) -> None:
        super().__init__(
            f"The run directory {paths.root} is gone: it was removed, moved or replaced while attempt {attempt} ran. "
            "Everything of this attempt on this machine is stopped, and nothing more is written there. Put the "
            "directory back where it was, then `pawl resume` it."
        )


def look_for(paths: RunPaths, attempt: int) -> Presence:
    """One look. A directory of this name without the attempt's claim is another one: pawl never removes a claim."""
    for path in (paths.root, paths.claim(attempt)):
        try:
            os.stat(path)
        except FileNotFoundError:
            return Presence.GONE
        except OSError:
            return Presence.UNKNOWN
    return Presence.HERE


@dataclass(slots=True)
class Vanishing:
    """Looks in a row that found nothing, and since when (monotonic seconds)."""

    looks: int = 0
    since: float = 0.0

    def note(self, presence: Presence, now: float) -> bool:
        """Take in a look; True once the directory is gone beyond doubt. Pure in `now`."""
        if presence is not Presence.GONE:
            self.looks = 0
            return False
        if self.looks == 0:
            self.since = now
        self.looks += 1
        return self.looks >= GONE_LOOKS and now - self.since >= GONE_S
