"""Threads that may wait for a file system, so that the agent's and the supervisor's own loops never do.

A `Worker` runs jobs one after another; results come back as values when the loop asks for them. A job that never
returns (a dead NFS server) costs its own thread and nothing else; the threads are daemons and do not hold the process.
"""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a job gave: its value, or the exception that ended it."""

    name: str
    value: Any = None
    error: Exception | None = None


class Worker:
    """One thread, one queue. `pending` counts jobs that have not been answered yet."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[str, Callable[[], Any]]] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self.pending = 0
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, name: str, job: Callable[[], Any]) -> None:
        """Queue a job; its result will bear this name."""
        self.pending += 1
        self._jobs.put((name, job))

    def results(self) -> list[Result]:
        """What has been finished since the last call."""
        found = []
        while not self._results.empty():
            found.append(self._results.get())
        self.pending -= len(found)
        return found

    def _run(self) -> None:
        while True:
            name, job = self._jobs.get()
            try:
                self._results.put(Result(name=name, value=job()))
            except Exception as error:  # the loop that asked decides what an error means
                self._results.put(Result(name=name, error=error))
