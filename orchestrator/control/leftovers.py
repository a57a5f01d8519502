"""What a run directory holds that nothing needs any more, and its removal: `pawl clean`.

    trash        left by a deletion that was cut short
    partial      a save that was never completed, of a launch that is over
    quarantined  a checkpoint that failed its verification
    superseded   complete, but retention lets it go, a later launch went back before it, or a twin holds its step
    logs         text of ranks and evidence of faults, of cycles long past; their records stay

Broken complete folders are only told: an error of the file system looks the same. Removal is fenced as retention is.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.control.shelf import Item, Shelf, tree_bytes, why_partial_stays
from orchestrator.state import gc
from orchestrator.state.fsio import list_names
from orchestrator.state.rundir import EntryKind, parse_number

DAY_S = 86_400.0
_BROKEN = "it is complete by its name but not whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """Something that may go, or (`stays`) why it is left alone. `path` is relative to the run directory."""

    kind: str
    path: str
    bytes: int | None
    why: str
    stays: str | None = None


def find_leftovers(shelf: Shelf, *, now_unix: float, logs_days: float) -> tuple[Leftover, ...]:
    """All of it, checkpoints first. Looks only."""
    found = [leftover for item in shelf.items if (leftover := _of_checkpoint(shelf, item)) is not None]
    return (*found, *_logs(shelf, before_unix=now_unix - logs_days * DAY_S))


def _of_checkpoint(shelf: Shelf, item: Item) -> Leftover | None:
    path = shelf.paths.relative(shelf.paths.checkpoints / item.entry)
    match item.kind:
        case EntryKind.TRASH:
            return Leftover(kind="trash", path=path, bytes=item.bytes, why="a deletion was cut short")
        case EntryKind.QUARANTINED:
            return Leftover(kind="quarantined", path=path, bytes=item.bytes, why="it failed its verification")
        case EntryKind.PARTIAL:
            why, stays = "a save that was never completed", why_partial_stays(shelf, item)
            return Leftover(kind="partial", path=path, bytes=item.bytes, why=why, stays=stays)
        case EntryKind.COMMITTED:
            return _of_complete(shelf, item, path)
        case _:
            return None  # what pawl did not write is not pawl's to judge


def _of_complete(shelf: Shelf, item: Item, path: str) -> Leftover | None:
    base = Leftover(kind="superseded", path=path, bytes=item.bytes, why="retention lets it go")
    if shelf.counting.undecided:
        return None if item.counts else replace(base, why=item.why_not or "", stays="unknown which checkpoints count")
    if item.counts:
        return base if item.fate is None else None
    if item.label is not None:
        return replace(base, why=item.why_not or "", stays="kept by name")
    if _is_another_history(shelf, item):
        return replace(base, why=item.why_not or "")
    return replace(base, kind="broken", why=item.why_not or _BROKEN, stays="pawl ckpt verify and rm look at each")


def _is_another_history(shelf: Shelf, item: Item) -> bool:
    """A whole checkpoint of this run that can never count again."""
    why = item.why_not or ""
    return why == "a later launch went back before this step" or why.endswith("holds the same step")


def _logs(shelf: Shelf, *, before_unix: float) -> Iterator[Leftover]:
    """logs/ and evidence/ of cycles before the newest launch that nothing wrote to since `before_unix`."""
    paths, newest = shelf.paths, shelf.epoch
    for attempt in _numbers(paths.attempts):
        for cycle in _numbers(paths.cycles(attempt)):
            if (attempt, cycle) >= (newest.attempt, newest.cycle):
                continue
            for folder in (paths.logs(attempt, cycle), paths.evidence(attempt, cycle)):
                touched, size = _newest_change(folder), tree_bytes(folder)
                if touched is not None and touched < before_unix and size:
                    yield Leftover(kind="logs", path=paths.relative(folder), bytes=size, why="of a cycle long past")


def _numbers(folder: Path) -> list[int]:
    return sorted(filter(None, map(parse_number, list_names(folder) or ())))


def _newest_change(folder: Path) -> float | None:
    """When anything below was written last; None when that is unknown or there is nothing."""
    try:
        return max((path.lstat().st_mtime for path in folder.rglob("*")), default=None)
    except OSError:
        return None


def remove_leftovers(shelf: Shelf, leftovers: Iterable[Leftover]) -> Iterator[tuple[Leftover, str | None]]:
    """Remove those that may go, one after the other: (leftover, None) or (leftover, why it is still there).

    Stops with PawlError when a later launch began meanwhile: then the look is old.
    """
    for leftover in leftovers:
        if leftover.stays is None:
            yield leftover, _remove(shelf, leftover)


def _remove(shelf: Shelf, leftover: Leftover) -> str | None:
    path = shelf.paths.root / leftover.path
    gc.refuse_if_stale(shelf.paths, shelf.epoch)
    try:
        if leftover.kind not in ("trash", "logs"):
            if not gc.to_trash(shelf.paths, path.name, epoch=shelf.epoch):
                return "it was kept by name at this very moment"
            path = shelf.paths.trash(path.name)
        return None if gc.remove(path) else f"{path} could not be removed whole"
    except FileNotFoundError:
        return None  # somebody else removed it
    except OSError as error:
        return f"{path}: {error.strerror or error}"
