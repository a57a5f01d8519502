"""Room for what retention keeps at one time, the checkpoint that is being written included.

    at once = keep_last + those kept for ever by keep_every + 1 being written       × bytes of one, and one percent

Free space is what the file system gives to this user. A quota that the file system does not count into it is unknown
to pawl, and said to be.
"""

import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import PawlError
from orchestrator.state.records import LaunchFacts
from orchestrator.state.retention import Retention

MARGIN = 1.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """How many checkpoints are there at once at most, and what they take. `each` and `total` in bytes."""

    kept: int
    for_ever: int
    writing: int
    each: int

    @property
    def total(self) -> int:
        return int((self.kept + self.for_ever + self.writing) * self.each * MARGIN)

    @property
    def text(self) -> str:
        """2 kept, 10 kept for ever (keep_every) and 1 being written at 1.0 GiB each need 13.1 GiB"""
        parts = [f"{self.kept} kept"]
        parts += [f"{self.for_ever} kept for ever (keep_every)"] if self.for_ever else []
        parts += [f"{self.writing} being written"] if self.writing else []
        some = " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0]
        return f"{some} at {gib(self.each)} each need {gib(self.total)}"


def need_of(facts: LaunchFacts, retention: Retention) -> Need:
    """What a run needs at most. Pure."""
    saves = facts.train_steps // facts.checkpoint_interval + (facts.train_steps % facts.checkpoint_interval > 0)
    if retention.keep_last == 0 or retention.keep_last >= saves:
        return Need(kept=saves or 1, for_ever=0, writing=0, each=facts.checkpoint_bytes)
    for_ever = 0
    if retention.keep_every is not None:
        meet = math.lcm(retention.keep_every, facts.checkpoint_interval)
        # The fullest moment is the last save: those behind the newest keep_last that are complete then.
        for_ever = (saves - 1 - retention.keep_last) * facts.checkpoint_interval // meet
    return Need(kept=retention.keep_last, for_ever=for_ever, writing=1, each=facts.checkpoint_bytes)


def free_bytes(folder: Path) -> int | None:
    """Free for this user on the file system that will hold `folder`; None when it cannot be asked."""
    try:
        return shutil.disk_usage(nearest_existing(folder)).free
    except OSError:
        return None


def nearest_existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def shortage(run: str, folder: Path, need: Need, *, held: int = 0) -> str | None:
    """Why the checkpoints of `run` do not fit beside `folder`, with what to change; None when they do, or unknown.

    `held`: bytes of its checkpoints that are there already.
    """
    free = free_bytes(folder)
    if free is None or max(0, need.total - held) <= free:
        return None
    there = f", {gib(held)} of that are there" if held else ""
    return (
        f"There is no room for the checkpoints of {run!r} in {nearest_existing(folder)}: {need.text}{there}, free are "
        f"{gib(free)}. Free some space, choose another --runs-root, or change checkpoints.keep_last, keep_every or "
        "checkpoint_interval."
    )


def require_room(run: str, folder: Path, need: Need, *, held: int = 0) -> None:
    """Raise PawlError when the checkpoints of `run` do not fit."""
    why = shortage(run, folder, need, held=held)
    if why is not None:
        raise PawlError(why)


def space_line(folder: Path, need: Need) -> str:
    """What `check --here` and a dry run say about room."""
    free = free_bytes(folder)
    known = "free space unknown" if free is None else f"free {gib(free)}"
    return f"checkpoints {need.text}; {known} in {nearest_existing(folder)}, a quota of yours is not known to pawl"


def gib(count: float) -> str:
    """Bytes for a person, in GiB or MiB."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"
