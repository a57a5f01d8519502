"""A rank whose agent is gone ends itself: nobody watches it any more, and it would hold the node for ever.

For as long as it lives the agent holds an exclusive lock on the shared-memory file of its node; the kernel takes the
lock away with the last breath of the process, however it dies. A thread of each rank asks now and then whether the
lock is free. A stopped or slow agent keeps its lock, and a file system that cannot answer proves nothing.
"""

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainer.beat import AGENT_LOST, AGENT_LOST_AT

FREE_LOOKS = 3


def is_lock_free(fd: int) -> bool | None:
    """Whether the agent's lock on this file is free; None when the kernel does not say."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True


@dataclass(slots=True)
class Absence:
    """Looks in a row that found the lock free, and since when (s)."""

    looks: int = 0
    since: float = 0.0

    def note(self, free: bool | None, now: float, *, limit_s: float) -> bool:
        """Take in a look; True once the agent has been gone for `limit_s` beyond doubt. Pure in `now`."""
        if not free:
            self.looks = 0
            return False
        if self.looks == 0:
            self.since = now
        self.looks += 1
        return self.looks >= FREE_LOOKS and now - self.since >= limit_s


class AgentGuard:
    """The thread that looks. `on_gone` is called once, in it, with one sentence."""

    def __init__(self, shm: Path, *, interval_s: float, on_gone: Callable[[str], None]) -> None:
        """Open the agent's file; it is kept open for the life of the rank. Raises OSError."""
        self._path = shm
        self._fd = os.open(shm, os.O_RDONLY | os.O_CLOEXEC)
        self.limit_s = AGENT_LOST.unpack(os.pread(self._fd, AGENT_LOST.size, AGENT_LOST_AT))[0] / 1000
        self._interval_s = min(interval_s, self.limit_s / (FREE_LOOKS + 1))
        self._on_gone = on_gone

    def start(self) -> None:
        """Look from now on; an agent that asks for it with 0 ms is not watched."""
        if self.limit_s > 0:
            threading.Thread(target=self._watch, name="agent-guard", daemon=True).start()

    def _watch(self) -> None:
        absence = Absence()
        while not absence.note(is_lock_free(self._fd), time.monotonic(), limit_s=self.limit_s):
            time.sleep(self._interval_s)
        self._on_gone(
            f"The agent of this node is gone: its lock on {self._path} has been free for {self.limit_s:g} s. Nobody "
            "watches this rank any more, so it ends itself; a new attempt resumes from the newest checkpoint."
        )

    def tidy(self) -> None:
        """This rank ends: remove the file of an agent that is dead, which nobody else will do.

        A file that a later launch made under the same name is left alone.
        """
        if self.limit_s <= 0 or not is_lock_free(self._fd):
            return
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._fd), os.stat(self._path)):
                self._path.unlink()
