"""Which checkpoints count: reader-side fencing, a pure function of names, manifests and cycle records.

A checkpoint (epoch e, step s) counts only if every later epoch has resume_from ≥ s: a later launch that went back
before s has started another history, in which (e, s) never happened, however late its writer wakes up and renames it.

    a1g1c1  ── 100 ── 200 ── 300          300 was committed by a zombie after a1g1c2 had resumed from 200:
    a1g1c2            200 ── 250 ──       it does not count; 100, 200 and 250 do.

Everything else in checkpoints/ (partial, stray, foreign, of another run, a file missing) is reported, never chosen.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.state.epochs import PLAIN_EPOCH, Epoch
from orchestrator.state.rundir import CheckpointName, EntryKind, classify_entry


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEntry:
    """A name in checkpoints/ and what was found inside. `defect`: why it is not whole, None when it is.

    `run`: the run its manifest names, None when there is no readable manifest. `total_bytes`: None when unknown.
    """

    entry: str
    defect: str | None = None
    run: str | None = None
    total_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that counts."""

    name: str
    step: int
    epoch: Epoch
    total_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleFence:
    """A launch and the step it resumed from (0: the beginning). `resume_step` None: its record cannot be read."""

    epoch: Epoch
    resume_step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """An entry that does not count, and why."""

    entry: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Counting:
    """`counted` newest first; `reported` by name; `undecided`: launches whose resume point is unknown."""

    counted: tuple[Checkpoint, ...] = ()
    reported: tuple[Reported, ...] = ()
    undecided: tuple[Epoch, ...] = ()

    @property
    def newest(self) -> Checkpoint | None:
        """The one to resume from; None when the run starts at the beginning."""
        return self.counted[0] if self.counted else None

    def before(self, step: int) -> Checkpoint | None:
        """The newest one that counts and is older than `step`."""
        return next((checkpoint for checkpoint in self.counted if checkpoint.step < step), None)


def resume_step(resume_from: str | None) -> int | None:
    """The step in a cycle's `resume_from`: 0 for None (from the beginning), None when it is no checkpoint name."""
    if resume_from is None:
        return 0
    name = CheckpointName.parse(resume_from)
    return None if name is None else name.step


def fences_of(cycles: Iterable[tuple[Epoch, str | None]]) -> tuple[CycleFence, ...]:
    """Fences of (epoch, resume_from) pairs, oldest first."""
    found = (CycleFence(epoch=epoch, resume_step=resume_step(name)) for epoch, name in cycles)
    return tuple(sorted(found, key=lambda fence: fence.epoch))


def survives(epoch: Epoch, step: int, fences: Iterable[CycleFence]) -> bool:
    """True when no launch later than `epoch` resumed from before `step`, or from an unknown place."""
    return all(f.resume_step is not None and f.resume_step >= step for f in fences if f.epoch > epoch)


def count(entries: Iterable[CheckpointEntry], fences: tuple[CycleFence, ...], *, run: str | None = None) -> Counting:
    """Sort everything found in checkpoints/ into what counts and what does not. Total: any names, any order."""
    known = {fence.epoch for fence in fences}
    counted: dict[int, Checkpoint] = {}
    reported: list[Reported] = []
    for entry in sorted(entries, key=lambda e: e.entry):
        kind, name = classify_entry(entry.entry)
        why = _why_not(entry, kind, name, fences, known, run)
        if why is not None or name is None:
            reported.append(Reported(entry=entry.entry, why=why or "not a checkpoint name"))
            continue
        found = Checkpoint(name=name.text, step=name.step, epoch=name.epoch, total_bytes=entry.total_bytes)
        rival = counted.get(name.step)
        if rival is not None:
            older, found = sorted((rival, found), key=lambda checkpoint: checkpoint.epoch)
            reported.append(Reported(entry=older.name, why=f"{found.name} holds the same step"))
        counted[name.step] = found
    return Counting(
        counted=tuple(counted[step] for step in sorted(counted, reverse=True)),
        reported=tuple(sorted(reported, key=lambda report: report.entry)),
        undecided=tuple(fence.epoch for fence in fences if fence.resume_step is None),
    )


def _why_not(
    entry: CheckpointEntry,
    kind: EntryKind,
    name: CheckpointName | None,
    fences: tuple[CycleFence, ...],
    known: set[Epoch],
    run: str | None,
) -> str | None:
    if kind is not EntryKind.COMMITTED or name is None:
        return _KIND_WHY[kind]
    if entry.defect is not None:
        return entry.defect
    if run is not None and entry.run is not None and entry.run != run:
        return f"belongs to run {entry.run}"
    if name.step < 1:
        return "a checkpoint is taken after step 1 at the earliest"
    if name.epoch != PLAIN_EPOCH and name.epoch not in known:
        return f"this run has no launch {name.epoch.text}"
    if not survives(name.epoch, name.step, fences):
        return "a later launch went back before this step"
    return None


_KIND_WHY = {
    EntryKind.COMMITTED: "not a checkpoint name",
    EntryKind.PARTIAL: "was never completed",
    EntryKind.QUARANTINED: "quarantined",
    EntryKind.TRASH: "being deleted",
    EntryKind.FOREIGN: "not a checkpoint name",
}


def counts(entries: Iterable[CheckpointEntry], fences: tuple[CycleFence, ...]) -> tuple[Checkpoint, ...]:
    """Only what counts, newest first."""
    return count(entries, fences).counted
