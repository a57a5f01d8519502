"""All that lies in a run's checkpoints/, with everything a person or a command wants to know before touching it.

    scan + fences + ledger + frozen config + newest attempt ─▶ Shelf ─▶ ls, verify, rm, keep, clean, fork

`counts` and its reason are those of `counting.py`; `protected` says why nobody may delete an entry; `fate` what
retention would do with it now.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from orchestrator.control.launchers import make_launcher
from orchestrator.control.observe import newest_attempt, observe_attempt, read_attempt, read_fences, scan_checkpoints
from orchestrator.decide.observation import Liveness
from orchestrator.errors import PawlError, UsageError
from orchestrator.state import ledger
from orchestrator.state.checkpoint_index import MeshInfo
from orchestrator.state.codec import decode
from orchestrator.state.counting import Counting, count
from orchestrator.state.epochs import PLAIN_EPOCH, Epoch
from orchestrator.state.fsio import read_text
from orchestrator.state.history import History, replay
from orchestrator.state.records import Unreadable, parse_cycle, parse_launch_facts, parse_manifest
from orchestrator.state.retention import Retention, kept_by_name, why_kept, why_protected
from orchestrator.state.run_at import RunAt
from orchestrator.state.rundir import CheckpointName, EntryKind, RunPaths, classify_entry
from orchestrator.submit.facts import current_config, retention_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One entry of checkpoints/. `why_not`: why it does not count; `label`: kept by name ("": without a label).

    bytes, created_unix and mesh are None where they are unknown.
    """

    entry: str
    kind: EntryKind
    step: int | None
    epoch: Epoch | None
    bytes: int | None
    created_unix: float | None
    mesh: MeshInfo | None
    why_not: str | None
    label: str | None
    is_resumed_from: bool
    protected: str | None
    fate: str | None

    @property
    def counts(self) -> bool:
        return self.why_not is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """`run`: the name of its directory, which commands take; `recorded_run`: the one its records name (None: unknown),
    another where the directory was copied. `epoch`: the newest launch, PLAIN_EPOCH before any; `busy`: why something
    may still write here, else None."""

    paths: RunPaths
    run: str
    recorded_run: str | None
    items: tuple[Item, ...]
    counting: Counting
    kept: dict[str, str]
    resumed_from: str | None
    retention: Retention
    epoch: Epoch
    busy: str | None
    history: History

    def item(self, entry: str) -> Item | None:
        return next((item for item in self.items if item.entry == entry), None)


def read_shelf(paths: RunPaths) -> Shelf:
    """Read a run's shelf. Raises PawlError for what cannot be known, because commands act on it."""
    entries, fences = scan_checkpoints(paths), read_fences(paths)
    if entries is None or fences is None:
        raise PawlError(
            f"{paths.checkpoints} or {paths.attempts} cannot be listed, so it is unknown which checkpoints count. "
            "Make them readable and try again."
        )
    book = ledger.read(paths.root)
    if book.unread:
        raise PawlError(f"{paths.root}: {book.unread[0]}, so it is unknown what is kept and what runs. Restore it.")
    facts = parse_launch_facts(read_text(paths.launch_facts))
    recorded = None if isinstance(facts, Unreadable) else facts.run
    counting = count(entries, fences, run=recorded)
    history, kept = replay(book.events), kept_by_name(book.events)
    epoch = fences[-1].epoch if fences else PLAIN_EPOCH
    resumed_from, retention = _resumed_from(paths, epoch), _retention(paths)
    why = {report.entry: report.why for report in counting.reported}
    place = {checkpoint.name: index for index, checkpoint in enumerate(counting.counted)}
    items = []
    for entry in sorted(entries, key=lambda e: e.entry):
        protected = fate = None
        if (index := place.get(entry.entry)) is not None:
            checkpoint = counting.counted[index]
            protected = why_protected(index, checkpoint, resumed_from=resumed_from, kept=kept)
            fate = why_kept(index, checkpoint, retention=retention, resumed_from=resumed_from, kept=kept)
        elif entry.entry in kept:
            protected = fate = "kept by name"
        items.append(
            _item(
                paths, entry.entry, size=entry.total_bytes, why_not=why.get(entry.entry), label=kept.get(entry.entry),
                is_resumed_from=entry.entry == resumed_from, protected=protected, fate=fate,
            )
        )  # fmt: skip
    items.sort(key=lambda item: (item.step or -1, item.epoch or PLAIN_EPOCH, item.entry), reverse=True)
    return Shelf(
        paths=paths, run=paths.root.name, recorded_run=recorded, items=tuple(items), counting=counting, kept=kept,
        resumed_from=resumed_from,
        retention=retention, epoch=epoch, busy=why_busy(paths, history), history=history,
    )  # fmt: skip


def _item(
    paths: RunPaths, entry: str, *, size: int | None, why_not: str | None, label: str | None, is_resumed_from: bool,
    protected: str | None, fate: str | None,
) -> Item:  # fmt: skip
    kind, name = classify_entry(entry)
    folder = paths.checkpoints / entry
    manifest = parse_manifest(read_text(folder / "manifest.json"))
    return Item(
        entry=entry,
        kind=kind,
        step=None if name is None else name.step,
        epoch=None if name is None else name.epoch,
        bytes=tree_bytes(folder) if size is None else size,
        created_unix=_mtime(folder) if isinstance(manifest, Unreadable) else manifest.created_unix,
        mesh=read_mesh(folder),
        why_not=why_not,
        label=label,
        is_resumed_from=is_resumed_from,
        protected=protected,
        fate=fate,
    )


def _resumed_from(paths: RunPaths, epoch: Epoch) -> str | None:
    cycle = parse_cycle(read_text(paths.cycle_file(epoch.attempt, epoch.cycle)))
    return None if isinstance(cycle, Unreadable) else cycle.resume_from


def _retention(paths: RunPaths) -> Retention:
    """What the run's current config asks for; a config that cannot be read lets nothing go."""
    from orchestrator.config.yaml_loader import load_file

    document = load_file(current_config(paths))
    return Retention(keep_last=0) if document.problems else retention_of(document.root)


def why_busy(paths: RunPaths, history: History) -> str | None:
    """Why the newest attempt may still write to the run directory; None when nothing of it can run any more."""
    newest = newest_attempt(paths)
    if newest is None:
        return f"{paths.attempts} cannot be listed"
    last = history.last_attempt
    if newest == 0 or (last is not None and last.attempt == newest and last.outcome not in (None, "lost")):
        return None
    intent, _, problem = read_attempt(paths, newest)
    if problem is not None:
        return problem
    kind = intent.launcher if intent is not None and intent.launcher in ("slurm", "local") else "slurm"
    seen = observe_attempt(paths, newest, probe=make_launcher(kind), now_unix=0.0)
    return None if seen.liveness is Liveness.DEAD else f"attempt {newest} may still run: {seen.why}"


def read_mesh(folder: Path) -> MeshInfo | None:
    """The layout that wrote a checkpoint, None when its index does not say."""
    try:
        return decode(MeshInfo, json.loads(read_text(folder / "index.json") or "{}").get("mesh"))
    except (ValueError, AttributeError, RecursionError):
        return None


def tree_bytes(path: Path) -> int | None:
    """Bytes of a file, or of all files below a folder; None when a part of it cannot be looked at."""
    try:
        if not path.is_dir() or path.is_symlink():
            return path.lstat().st_size
        total = 0
        for folder, _, names in os.walk(path, onerror=_raise):
            total += sum(os.lstat(os.path.join(folder, name)).st_size for name in names)
    except OSError:
        return None
    return total


def _raise(error: OSError) -> None:
    raise error


def _mtime(path: Path) -> float | None:
    try:
        return path.lstat().st_mtime
    except OSError:
        return None


def choose(shelf: Shelf, at: RunAt) -> Item:
    """The entry that RUN@STEP or RUN@NAME means: of a step the one that counts, else the reason why none does.

    Without a step the newest that counts. Raises UsageError naming what there is.
    """
    if at.entry is not None:
        item = shelf.item(at.entry)
        if item is None:
            raise UsageError(f"{shelf.run} has no {at.entry} in {shelf.paths.checkpoints}. {_there_are(shelf)}")
        return item
    if not shelf.counting.counted and at.step is None:
        raise UsageError(f"{shelf.run} has no checkpoint that counts yet. `pawl save-now {shelf.run}` asks for one.")
    wanted = [item for item in shelf.items if at.step is None or item.step == at.step]
    counting = next((item for item in wanted if item.counts), None)
    if counting is not None:
        return counting
    if wanted:
        reasons = "; ".join(f"{item.entry}: {item.why_not}" for item in wanted)
        raise UsageError(
            f"{shelf.run} has no checkpoint of step {at.step} that counts. {reasons}. Name one of these exactly, as "
            f"{shelf.run}@{wanted[0].entry}, if it is meant all the same. {_there_are(shelf)}"
        )
    raise UsageError(f"{shelf.run} has no checkpoint of step {at.step}. {_there_are(shelf)}")


def _there_are(shelf: Shelf) -> str:
    steps = ", ".join(str(checkpoint.step) for checkpoint in reversed(shelf.counting.counted))
    return f"Those that count are of steps {steps}." if steps else "None counts yet."


def committed_name(item: Item) -> CheckpointName:
    """The checkpoint's name, of a complete entry. Raises UsageError for any other entry."""
    name = CheckpointName.parse(item.entry)
    if name is None or item.kind is not EntryKind.COMMITTED:
        raise UsageError(f"{item.entry} is no complete checkpoint: {item.why_not}.")
    return name


def why_not_removable(shelf: Shelf, item: Item) -> str | None:
    """Why an entry may not be removed now, as a sentence with what to do; None: it may."""
    if item.kind is EntryKind.TRASH:
        return f"it is trash already; `pawl clean {shelf.run} --apply` empties it."
    if item.label is not None:
        return f"it is kept by name. First: pawl ckpt release {shelf.run}@{item.entry}"
    if item.protected is not None:
        return f"it is {item.protected}." if item.protected.startswith("one of") else f"{item.protected}."
    if item.kind is EntryKind.COMMITTED and shelf.counting.undecided:
        return f"the record of launch {shelf.counting.undecided[0]} cannot be read: unknown which checkpoints count."
    if item.kind is EntryKind.PARTIAL:
        return why_partial_stays(shelf, item)
    return None


def why_partial_stays(shelf: Shelf, item: Item) -> str | None:
    """Why an unfinished folder is left alone: its writer may still be at work. Pure."""
    if item.epoch is None or (item.epoch < shelf.epoch and shelf.epoch.attempt > 0 and item.epoch.attempt > 0):
        return None
    if item.epoch.attempt == 0:
        return "a launch without supervisor wrote it, and it is unknown whether that one still runs."
    return None if shelf.busy is None else f"it may be written at this moment: {shelf.busy}."
