"""Copies and exports of checkpoints beside the training: what is due; pure.

    checkpoints.upload_to        each checkpoint that counts, newest first, to <upload_to>/<run>/<name>
    checkpoints.export_interval  those at multiples of it, as Hugging Face folders, to exports/step-<step>

A copy counts by the rule of the checkpoint it was made from: its name carries the epoch, the fences are the run's.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from orchestrator.state.counting import Checkpoint, CheckpointEntry, Counting, CycleFence, count
from orchestrator.state.records import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """checkpoints.upload_to (URL; None: no copies), checkpoints.export_interval (steps; None: no exports)."""

    upload_to: str | None = None
    export_interval: int | None = None

    def __post_init__(self) -> None:
        if self.export_interval is not None and self.export_interval < 1:
            raise ValueError(f"checkpoints.export_interval is {self.export_interval}; it is a number of steps from 1")

    def place(self, run: str) -> str | None:
        """Where the copies of a run lie; None: nowhere."""
        return None if self.upload_to is None else copies_place(self.upload_to, run)


def copies_place(url: str, run: str) -> str:
    """The folder of a run behind a URL that may serve several."""
    return f"{url.rstrip('/')}/{run}"


def url_problem(url: str) -> str | None:
    """What is wrong with a place for copies, without showing what may be a secret; None: nothing."""
    protocol, _, rest = url.partition("://")
    if not rest or not protocol.isalnum():
        return "this is no URL; write for example s3://bucket/folder or file:///scratch/copies"
    if "@" in rest.partition("/")[0] or "?" in rest or "#" in rest:
        return "a URL here holds no user, password or query; give credentials in the environment or a profile"
    if not url.isprintable():
        return "the URL holds control characters"
    if protocol == "memory":
        return "what lies in memory:// is gone with the process"
    return None


class Errand(StrEnum):
    """What is done with a checkpoint."""

    PUSH = "push"
    EXPORT = "export"


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """One errand for one checkpoint."""

    errand: Errand
    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What earlier errands have done: names of checkpoints that were copied to the place, steps that were exported."""

    pushed: frozenset[str] = frozenset()
    exported: frozenset[int] = frozenset()


def pushed_to(events: Iterable[Event], *, place: str | None) -> frozenset[str]:
    """Names of checkpoints that the ledger says were copied to `place`; a copy elsewhere is none."""
    uploads = (event for event in events if event.kind == "checkpoint_uploaded" and event.data.get("url") == place)
    return frozenset(str(event.data["name"]) for event in uploads if event.data.get("name") is not None)


def due(copies: Copies, counting: Counting, done: Done) -> tuple[Due, ...]:
    """What is to be done, in this order: copies before exports, the newest first."""
    pushes = [
        Due(errand=Errand.PUSH, checkpoint=checkpoint)
        for checkpoint in counting.counted
        if copies.upload_to is not None and checkpoint.name not in done.pushed
    ]
    exports = [
        Due(errand=Errand.EXPORT, checkpoint=checkpoint)
        for checkpoint in counting.counted
        if copies.export_interval is not None
        and checkpoint.step % copies.export_interval == 0
        and checkpoint.step not in done.exported
    ]
    return (*pushes, *exports)


def count_copies(listing: Iterable[Mapping[str, Any]], fences: tuple[CycleFence, ...]) -> Counting:
    """Which copies of a `transfer ls --json` count."""
    entries = [
        CheckpointEntry(
            entry=str(item["name"]),
            defect=None if item.get("defect") is None else str(item["defect"]),
            total_bytes=item.get("num_bytes"),
        )
        for item in listing
    ]
    return count(entries, fences)
