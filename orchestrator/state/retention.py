"""Which checkpoints may be deleted now: a pure plan over what counts.

    what counts, newest first    12  11  10   9   8   7   6   5
    the last two, always          #   #
    keep_last: 3                  #   #   #
    keep_every: 4 (steps)         #               #
    resumed from; kept by name                        #       #          the rest may go

Deletable is only what counts: nothing before a newer one is complete, because only complete ones count. What does not
count is reported and left for people; unfinished folders go when a newer launch has committed since. `keep_last` 0
keeps all.
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass

from orchestrator.state.counting import Checkpoint, Counting
from orchestrator.state.records import Event
from orchestrator.state.rundir import EntryKind, classify_entry
from orchestrator.words import plural

NEVER_BELOW = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """checkpoints.keep_last and checkpoints.keep_every (steps; None: no checkpoint is kept for its step)."""

    keep_last: int = NEVER_BELOW
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("keep_last", self.keep_last), ("keep_every", self.keep_every)):
            if value is not None and type(value) is not int:
                raise TypeError(f"checkpoints.{name} is {value!r}, which is no integer")
        if self.keep_last < 0:
            raise ValueError(f"checkpoints.keep_last is {self.keep_last}; 0 keeps all, otherwise it is 2 or more")
        if self.keep_every is not None and self.keep_every < 1:
            raise ValueError(f"checkpoints.keep_every is {self.keep_every}; it is a number of steps from 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletionPlan:
    """`delete`: entry names in checkpoints/; `trash`: leftovers of an earlier deletion; `kept`: (name, why)."""

    delete: tuple[str, ...] = ()
    trash: tuple[str, ...] = ()
    kept: tuple[tuple[str, str], ...] = ()


def kept_by_name(events: Iterable[Event]) -> dict[str, str]:
    """Checkpoints that people keep, each with its label ("" without one). Events in their order."""
    kept: dict[str, str] = {}
    for event in events:
        name, label = event.data.get("name"), event.data.get("label")
        if not isinstance(name, str):
            continue
        if event.kind == "checkpoint_kept":
            kept[name] = label if isinstance(label, str) else ""
        elif event.kind == "checkpoint_released":
            kept.pop(name, None)
    return kept


def plan_deletion(
    counting: Counting,
    entries: tuple[str, ...],
    *,
    retention: Retention,
    resumed_from: str | None,
    kept: Container[str] | None = frozenset(),
    in_use: Container[str] = frozenset(),
) -> DeletionPlan:
    """What may go now. `kept` None: it is unknown what people keep, so nothing goes. `in_use`: read at this moment."""
    trash = tuple(entry for entry in entries if classify_entry(entry)[0] is EntryKind.TRASH)
    unknown = "unknown which checkpoints count" if counting.undecided else None
    if kept is None:
        unknown = "unknown what is kept by name: the ledger cannot be read"
    if unknown is not None:
        return DeletionPlan(trash=trash, kept=tuple((checkpoint.name, unknown) for checkpoint in counting.counted))
    delete: list[str] = []
    kept_why: list[tuple[str, str]] = []
    for index, checkpoint in enumerate(counting.counted):
        why = why_kept(index, checkpoint, retention=retention, resumed_from=resumed_from, kept=kept or ())
        if why is None and checkpoint.name in in_use:
            why = "it is being copied or exported"
        if why is None:
            delete.append(checkpoint.name)
        else:
            kept_why.append((checkpoint.name, why))
    return DeletionPlan(delete=(*delete, *_stale_partials(counting, entries)), trash=trash, kept=tuple(kept_why))


def why_protected(index: int, checkpoint: Checkpoint, *, resumed_from: str | None, kept: Container[str]) -> str | None:
    """Why nobody may delete the `index`-th newest that counts, whatever retention asks for; None: one may."""
    if index < NEVER_BELOW:
        return "one of the last two that count"
    if checkpoint.name == resumed_from:
        return "the newest launch resumed from it"
    return "kept by name" if checkpoint.name in kept else None


def why_kept(
    index: int, checkpoint: Checkpoint, *, retention: Retention, resumed_from: str | None, kept: Container[str]
) -> str | None:
    """Why retention leaves the `index`-th newest that counts; None: it lets it go."""
    protected = why_protected(index, checkpoint, resumed_from=resumed_from, kept=kept)
    if protected is not None:
        return protected
    if retention.keep_last == 0:
        return "keep_last is 0: all are kept"
    if index < retention.keep_last:
        return f"one of the last {retention.keep_last}"
    if retention.keep_every is not None and checkpoint.step % retention.keep_every == 0:
        return f"its step is a multiple of keep_every, {plural(retention.keep_every, 'step')}"
    return None


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
