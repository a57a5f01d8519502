"""Retention of checkpoints: a pure plan, and a thin hand that looks again before it deletes.

The orchestrator alone deletes and quarantines. Deletable is only what counts and is older than the `keep_last` newest
that count, never one of the last two, never the one the running launch resumed from, and nothing before a newer one is
complete, because only complete ones count. Partial folders go when a newer launch has committed since. What does not
count is reported and left for people. `keep_last` 0 keeps all.
"""

import os
import shutil
from dataclasses import dataclass

from orchestrator.control.observe import count_checkpoints, read_fences
from orchestrator.errors import PawlError
from orchestrator.state.counting import Counting
from orchestrator.state.epochs import Epoch
from orchestrator.state.fsio import fsync_dir, list_names
from orchestrator.state.rundir import CheckpointName, EntryKind, RunPaths, classify_entry

_NEVER_BELOW = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletionPlan:
    """`delete`: entry names in checkpoints/; `trash`: leftovers of an earlier deletion; `kept`: (name, why)."""

    delete: tuple[str, ...] = ()
    trash: tuple[str, ...] = ()
    kept: tuple[tuple[str, str], ...] = ()


def plan_deletion(
    counting: Counting,
    entries: tuple[str, ...],
    *,
    keep_last: int,
    resumed_from: str | None,
    undecided_ok: bool = False,
) -> DeletionPlan:
    """What may go now. Pure. Raises ValueError for a negative keep_last."""
    if keep_last < 0:
        raise ValueError(f"checkpoints.keep_last is {keep_last}; 0 keeps all, otherwise it is 1 or more")
    trash = tuple(entry for entry in entries if classify_entry(entry)[0] is EntryKind.TRASH)
    if counting.undecided and not undecided_ok:
        kept = tuple((checkpoint.name, "unknown which checkpoints count") for checkpoint in counting.counted)
        return DeletionPlan(trash=trash, kept=kept)
    delete: list[str] = []
    kept_why: list[tuple[str, str]] = []
    for index, checkpoint in enumerate(counting.counted):
        why = _why_kept(index, checkpoint.name, keep_last, resumed_from)
        if why is None:
            delete.append(checkpoint.name)
        else:
            kept_why.append((checkpoint.name, why))
    return DeletionPlan(delete=(*delete, *_stale_partials(counting, entries)), trash=trash, kept=tuple(kept_why))


def _why_kept(index: int, name: str, keep_last: int, resumed_from: str | None) -> str | None:
    if keep_last == 0:
        return "keep_last is 0: all are kept"
    if index < _NEVER_BELOW:
        return "one of the last two that count"
    if index < keep_last:
        return f"one of the last {keep_last}"
    return "the running launch resumed from it" if name == resumed_from else None


def _stale_partials(counting: Counting, entries: tuple[str, ...]) -> tuple[str, ...]:
    """Unfinished folders of launches before the one that wrote the newest checkpoint that counts."""
    if counting.newest is None:
        return ()
    partials = ((entry, *classify_entry(entry)) for entry in entries)
    return tuple(
        entry
        for entry, kind, name in partials
        if kind is EntryKind.PARTIAL and name is not None and name.epoch < counting.newest.epoch
    )


def collect(
    paths: RunPaths, *, epoch: Epoch, keep_last: int, resumed_from: str | None, run: str | None
) -> DeletionPlan:
    """Delete what may go, on behalf of the launch `epoch`; returns what was done.

    Refuses (PawlError) when a later launch exists: then this process is the past, and what counts is not its to say.
    """
    _refuse_if_stale(paths, epoch)
    counting, entries = count_checkpoints(paths, run=run), list_names(paths.checkpoints)
    if counting is None or entries is None:
        return DeletionPlan(kept=(("checkpoints/", "cannot be listed"),))
    plan = plan_deletion(counting, entries, keep_last=keep_last, resumed_from=resumed_from)
    for entry in plan.delete:
        _refuse_if_stale(paths, epoch)
        os.rename(paths.checkpoints / entry, paths.trash(entry))
    if plan.delete:
        fsync_dir(paths.checkpoints)
    for entry in (*(paths.trash(entry).name for entry in plan.delete), *plan.trash):
        shutil.rmtree(paths.checkpoints / entry, ignore_errors=True)
    return plan


def quarantine(paths: RunPaths, name: str, *, epoch: Epoch) -> str:
    """Set a bad checkpoint aside under `.quarantine-…`, never delete it; returns the new name.

    Raises PawlError when `name` is no checkpoint's or a later launch exists, OSError when it cannot be renamed. Quietly
    done when it is set aside already.
    """
    if CheckpointName.parse(name) is None:
        raise PawlError(f"{name!r} is no checkpoint's name, so it is not set aside.")
    _refuse_if_stale(paths, epoch)
    target = paths.quarantined(name)
    if not target.exists():
        os.rename(paths.checkpoint(name), target)
        fsync_dir(paths.checkpoints)
    return target.name


def _refuse_if_stale(paths: RunPaths, epoch: Epoch) -> None:
    fences = read_fences(paths)
    if fences is None:
        raise PawlError(f"{paths.attempts} cannot be listed, so nothing is deleted: a later launch might exist.")
    newer = [fence.epoch for fence in fences if fence.epoch > epoch]
    if newer:
        raise PawlError(f"launch {newer[-1]} is later than this one ({epoch}): nothing is deleted or set aside.")
