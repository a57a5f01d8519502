"""What is done beside the training on the supervisor's node: copies and exports of checkpoints, a copy fetched back.

    a checkpoint commits ──▶ pawl ckpt push RUN@STEP, pawl export RUN --step STEP     (whichever is due, one at a time)
    none is left         ──▶ pawl ckpt pull RUN                                       (before the first cycle)

Each is a command a person could type, in a process of its own at low priority; it may be killed at any moment and run
again. Training never waits for it, and one that fails is said, and tried again after a growing pause.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.slurm.environment import scrub_environment
from orchestrator.state.copies import Copies, Done, Due, Errand, due
from orchestrator.state.counting import Counting
from orchestrator.state.fsio import list_names, read_text
from orchestrator.state.rundir import RunPaths

FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 1800.0
NICENESS = 10
SHOWN_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a command ended: exit code 0 or not; `why`: its last line. `what`: push, export or pull."""

    what: str
    name: str | None
    code: int
    why: str

    def ledger_data(self) -> dict[str, Any]:
        return {"errand": self.what, "name": self.name, "reason": self.why}


@dataclass(slots=True)
class _Running:
    process: subprocess.Popen[bytes]
    what: str
    name: str | None
    log: Path


class Beside:
    """At most one command at a time. `copied`: names of checkpoints that the ledger says are at the place."""

    def __init__(
        self,
        paths: RunPaths,
        copies: Copies,
        *,
        attempt: int,
        copied: frozenset[str] = frozenset(),
        program: Sequence[str] = (sys.executable, "-m", "orchestrator"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths, self._copies, self._attempt, self._clock = paths, copies, attempt, clock
        self._copied, self._program = set(copied), program
        self._running: _Running | None = None
        self._not_before, self._pause_s = 0.0, FIRST_PAUSE_S

    @property
    def busy_with(self) -> str | None:
        """The checkpoint that is read at the moment: it must not be deleted."""
        return None if self._running is None else self._running.name

    @property
    def is_pausing(self) -> bool:
        """Whether the last command failed, and the next waits."""
        return self._running is None and self._clock() < self._not_before

    @property
    def is_running(self) -> bool:
        return self._running is not None

    def due(self, counting: Counting) -> tuple[Due, ...]:
        """What is to be done with the checkpoints that count."""
        if self._copies == Copies():
            return ()
        names = list_names(self._paths.exports) or ()
        exported = frozenset(
            int(name.removeprefix("step-")) for name in names if name.removeprefix("step-").isdecimal()
        )
        return due(self._copies, counting, Done(pushed=frozenset(self._copied), exported=exported))

    def turn(self, counting: Counting) -> Result | None:
        """Take in what has ended, or start what is due; what ended, None otherwise. Raises OSError."""
        if self._running is not None:
            return self._ended()
        if self._clock() < self._not_before:
            return None
        for each in self.due(counting)[:1]:
            self._start_due(each)
        return None

    def fetch(self) -> None:
        """Start fetching the newest copy that counts. Raises OSError."""
        self._start("pull", None, ["ckpt", "pull", str(self._paths.root)])

    def stop(self) -> None:
        """Kill what runs."""
        if self._running is not None:
            self._running.process.kill()
            self._running.process.wait()
            self._running = None

    def _start_due(self, each: Due) -> None:
        root, step = str(self._paths.root), each.checkpoint.step
        if each.errand is Errand.PUSH:
            self._start("push", each.checkpoint.name, ["ckpt", "push", f"{root}@{each.checkpoint.name}"])
        else:
            out = str(self._paths.exports / f"step-{step:09d}")
            self._start("export", each.checkpoint.name, ["export", root, "--step", str(step), "--out", out])

    def _start(self, what: str, name: str | None, arguments: list[str]) -> None:
        self._paths.exports.mkdir(mode=0o750, exist_ok=True)
        log = self._paths.attempt(self._attempt) / f"{what}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*self._program, *arguments],
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment(os.environ),
            )  # fmt: skip
        os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
        self._running = _Running(process=process, what=what, name=name, log=log)

    def _ended(self) -> Result | None:
        running = self._running
        assert running is not None
        code = running.process.poll()
        if code is None:
            return None
        self._running = None
        lines = (read_text(running.log) or "").strip().splitlines() or ["it said nothing"]
        if code == 0:
            self._pause_s = FIRST_PAUSE_S
            if running.what == "push" and running.name is not None:
                self._copied.add(running.name)
        else:
            self._not_before = self._clock() + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        return Result(what=running.what, name=running.name, code=code, why=lines[-1][-SHOWN_CHARACTERS:])


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """For a command beside the training: not one of the job's own processes, or an agent would clean it away."""
    return {**scrub_environment(environ), "PYTHONSAFEPATH": "1"}
