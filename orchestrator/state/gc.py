"""Deleting checkpoints: the thin hand behind `retention.py`, which looks again before and after each move.

    plan ─▶ for each: later launch? ─ rename to .trash-… ─ later launch, or kept meanwhile? ─▶ back, else removed

The orchestrator alone deletes and quarantines. Only a rename is done before the second look, so that a process of the
past that wakes up between the two puts back what it took. A kill at any instant leaves a whole checkpoint under its
name, or one in .trash-… that nobody counts and the next collection removes.
"""

import os
import shutil
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from pathlib import Path

from orchestrator.control.observe import count_checkpoints, read_fences
from orchestrator.errors import PawlError
from orchestrator.state import ledger
from orchestrator.state.epochs import Epoch
from orchestrator.state.fsio import fsync_dir, list_names
from orchestrator.state.retention import DeletionPlan, Retention, kept_by_name, plan_deletion
from orchestrator.state.rundir import CheckpointName, RunPaths


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What a collection did: `deleted` are gone from view (their space too, but for `left`), the rest stayed."""

    plan: DeletionPlan
    deleted: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


def read_kept(paths: RunPaths) -> dict[str, str] | None:
    """Checkpoints that people keep by name, with their labels; None when the ledger cannot be read."""
    view = ledger.read(paths.root)
    return None if view.unread else kept_by_name(view.events)


def collect(
    paths: RunPaths,
    *,
    epoch: Epoch,
    retention: Retention,
    resumed_from: str | None,
    run: str | None,
    in_use: Container[str] = frozenset(),
) -> Collected:
    """Delete what may go, oldest first, on behalf of the launch `epoch`; returns what was done. `in_use` stays.

    Raises PawlError when a later launch exists: then this process is the past, and what counts is not its to say.
    Raises OSError when a folder cannot be renamed.
    """
    refuse_if_stale(paths, epoch)
    counting, entries = count_checkpoints(paths, run=run), list_names(paths.checkpoints)
    if counting is None or entries is None:
        return Collected(plan=DeletionPlan(kept=(("checkpoints/", "cannot be listed"),)))
    plan = plan_deletion(
        counting, entries, retention=retention, resumed_from=resumed_from, kept=read_kept(paths), in_use=in_use
    )  # fmt: skip
    moved = [entry for entry in reversed(plan.delete) if to_trash(paths, entry, epoch=epoch)]
    left = empty_trash(paths, (*(paths.trash(entry).name for entry in moved), *plan.trash))
    return Collected(plan=plan, deleted=tuple(moved), left=left)


def to_trash(paths: RunPaths, entry: str, *, epoch: Epoch, look: Callable[[], None] | None = None) -> bool:
    """Rename an entry of checkpoints/ to .trash-…, durably; False when it was kept by name at the last moment.

    `look` is called after the rename: what it raises puts the entry back, as a later launch does.
    Raises PawlError when a later launch exists, and OSError.
    """
    refuse_if_stale(paths, epoch)
    source, trash = paths.checkpoints / entry, paths.trash(entry)
    os.rename(source, trash)
    try:
        refuse_if_stale(paths, epoch)
        if look is not None:
            look()
        kept = read_kept(paths)
        if kept is None or entry in kept:
            os.rename(trash, source)
            return False
    except PawlError:
        os.rename(trash, source)
        raise
    finally:
        fsync_dir(paths.checkpoints)
    return True


def empty_trash(paths: RunPaths, entries: Iterable[str]) -> tuple[str, ...]:
    """Remove these .trash-… entries; the names of those that could not be removed whole."""
    return tuple(entry for entry in entries if not remove(paths.checkpoints / entry))


def remove(path: Path) -> bool:
    """Remove a file or folder and all below it; False when something of it is still there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)  # what stays is seen below
    else:
        try:
            path.unlink(missing_ok=True)
        except OSError:
            return False
    return not os.path.lexists(path)


def quarantine(paths: RunPaths, name: str, *, epoch: Epoch) -> str:
    """Set a bad checkpoint aside under `.quarantine-…`, never delete it; returns the new name.

    Raises PawlError when `name` is no checkpoint's or a later launch exists, OSError when it cannot be renamed. Quietly
    done when it is set aside already.
    """
    if CheckpointName.parse(name) is None:
        raise PawlError(f"{name!r} is no checkpoint's name, so it is not set aside.")
    refuse_if_stale(paths, epoch)
    target = paths.quarantined(name)
    if not target.exists():
        os.rename(paths.checkpoint(name), target)
        fsync_dir(paths.checkpoints)
    return target.name


def refuse_if_stale(paths: RunPaths, epoch: Epoch) -> None:
    """Raise PawlError when a launch later than `epoch` exists, or may exist."""
    fences = read_fences(paths)
    if fences is None:
        raise PawlError(f"{paths.attempts} cannot be listed, so nothing is deleted: a later launch might exist.")
    newer = [fence.epoch for fence in fences if fence.epoch > epoch]
    if newer:
        raise PawlError(f"launch {newer[-1]} is later than this one ({epoch}): nothing is deleted or set aside.")
