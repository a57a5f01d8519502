"""Reading a run directory: the only reader for decisions. What cannot be read is said, never replaced by a default.

    checkpoints/        names, manifests, sizes of the files they list ─▶ CheckpointEntry
    attempts/*/cycles/  cycle.json ─▶ CycleFence                       ─▶ Counting (which checkpoints count)
    attempts/NNNN/      intent, claim, processes on this machine       ─▶ Liveness of the newest attempt
    control/            requests nobody has acknowledged

A digest is not computed here (a checkpoint may have terabytes): sizes are compared, and the trainer verifies what it
loads and says which file is bad.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from orchestrator.agent import proc
from orchestrator.control.clock import Clock
from orchestrator.decide.observation import AttemptObservation, Liveness, RunObservation
from orchestrator.state.counting import CheckpointEntry, Counting, CycleFence, count, resume_step
from orchestrator.state.epochs import Epoch
from orchestrator.state.fsio import list_names, read_text
from orchestrator.state.history import History, replay, with_unrecorded_checkpoints
from orchestrator.state.ledger import read as read_ledger
from orchestrator.state.records import (
    Claim,
    Intent,
    Manifest,
    Unreadable,
    parse_claim,
    parse_cycle,
    parse_intent,
    parse_launch_facts,
    parse_manifest,
)
from orchestrator.state.requests import open_requests, read_requests
from orchestrator.state.rundir import CheckpointName, EntryKind, RunPaths, classify_entry, parse_number
from orchestrator.words import plural


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLook:
    """One look at a run: what decide_run takes, and how many ledger events it rests on."""

    seen: RunObservation
    history: History
    num_events: int


def scan_checkpoints(paths: RunPaths) -> tuple[CheckpointEntry, ...] | None:
    """Everything in checkpoints/, whole or not; None when the folder cannot be listed."""
    names = list_names(paths.checkpoints)
    return None if names is None else tuple(_entry(paths.checkpoints, name) for name in names)


def _entry(folder: Path, entry: str) -> CheckpointEntry:
    kind, name = classify_entry(entry)
    if kind is not EntryKind.COMMITTED or name is None:
        return CheckpointEntry(entry=entry)
    manifest = parse_manifest(read_text(folder / entry / "manifest.json"))
    if isinstance(manifest, Unreadable):
        return CheckpointEntry(entry=entry, defect=f"manifest.json: {manifest.why}")
    return CheckpointEntry(
        entry=entry, defect=_defect(folder / entry, name, manifest), run=manifest.run, total_bytes=manifest.total_bytes
    )


def _defect(folder: Path, name: CheckpointName, manifest: Manifest) -> str | None:
    """The first thing that makes a committed checkpoint not whole."""
    if manifest.step != name.step or manifest.epoch != name.epoch.text:
        return f"its manifest is of step {manifest.step}, epoch {manifest.epoch}"
    for file in manifest.files:
        if Path(file.name).name != file.name:
            return f"its manifest lists {file.name!r}, which is no plain file name"
        try:
            size = os.stat(folder / file.name).st_size
        except OSError as error:
            return f"{file.name}: {error.strerror}"
        if size != file.bytes:
            return f"{file.name} has {size} bytes, its manifest says {file.bytes}"
    return None


def read_fences(paths: RunPaths) -> tuple[CycleFence, ...] | None:
    """Every launch that was told to start, oldest first; None when a folder cannot be listed.

    A cycle folder without cycle.json never started a rank and fences nothing.
    """
    attempts = list_names(paths.attempts)
    if attempts is None:
        return None
    fences: list[CycleFence] = []
    for attempt in filter(None, map(parse_number, attempts)):
        cycles = list_names(paths.cycles(attempt))
        if cycles is None:
            return None
        found = (_fence(paths, attempt, cycle) for cycle in filter(None, map(parse_number, cycles)))
        fences.extend(fence for fence in found if fence is not None)
    return tuple(sorted(fences, key=lambda fence: fence.epoch))


def _fence(paths: RunPaths, attempt: int, number: int) -> CycleFence | None:
    path = paths.cycle_file(attempt, number)
    cycle = parse_cycle(read_text(path))
    if not isinstance(cycle, Unreadable) and (cycle.epoch.attempt, cycle.epoch.cycle) == (attempt, number):
        return CycleFence(epoch=cycle.epoch, resume_step=resume_step(cycle.resume_from))
    if not os.path.lexists(path):
        return None
    return CycleFence(epoch=Epoch(attempt, 1, number), resume_step=None)


def count_checkpoints(paths: RunPaths, *, run: str | None = None) -> Counting | None:
    """Which checkpoints count now; None when checkpoints/ or attempts/ cannot be listed."""
    entries, fences = scan_checkpoints(paths), read_fences(paths)
    if entries is None or fences is None:
        return None
    return count(entries, fences, run=run)


def local_liveness(intent: Intent | None, claim: Claim | None) -> tuple[Liveness, str]:
    """May anything of a local attempt still run? Answered on the machine that runs it; elsewhere it is unknown.

    Agents and ranks outlive their supervisor for a while, so its death alone is not the end: no process with the
    attempt's nonce may be left.
    """
    if intent is None:
        return Liveness.PENDING, "its intent is not written yet"
    if claim is None:
        left = proc.find(nonce=intent.nonce)
        return Liveness.PENDING, f"not claimed yet; {plural(len(left), 'process', 'processes')} of it run"
    if claim.nonce != intent.nonce:
        return Liveness.DEAD, "it was abandoned before it began"
    if claim.host != os.uname().nodename:
        return Liveness.UNKNOWN, f"it was started on {claim.host}, this is {os.uname().nodename}"
    if claim.boot_id != proc.boot_id():
        return Liveness.DEAD, f"{claim.host} has been booted since"
    if proc.is_alive(claim.pid, claim.start_ticks):
        return Liveness.ALIVE, f"its supervisor runs (pid {claim.pid} on {claim.host})"
    left = proc.find(nonce=intent.nonce)
    if left:
        return Liveness.ALIVE, f"its supervisor is gone, {len(left)} of its processes are still ending"
    return Liveness.DEAD, f"its supervisor (pid {claim.pid}) and all its processes are gone"


def read_attempt(paths: RunPaths, attempt: int) -> tuple[Intent | None, Claim | None, str | None]:
    """Intent and claim of an attempt, None where absent; the text says what exists but cannot be read."""
    values: list[Intent | Claim | None] = []
    for path, parse in ((paths.intent(attempt), parse_intent), (paths.claim(attempt), parse_claim)):
        if not os.path.lexists(path):
            values.append(None)
            continue
        record = parse(read_text(path))
        if isinstance(record, Unreadable):
            return None, None, f"{paths.relative(path)}: {record.why}"
        values.append(record)
    intent, claim = values
    return (
        intent if isinstance(intent, Intent) else None,
        claim if isinstance(claim, Claim) else None,
        None,
    )


def newest_attempt(paths: RunPaths) -> int | None:
    """The highest attempt number, 0 when there is none, None when attempts/ cannot be listed."""
    names = list_names(paths.attempts)
    return None if names is None else max(filter(None, map(parse_number, names)), default=0)


class Probe(Protocol):
    """Who can tell whether an attempt may still run: this machine's processes (`local_liveness`), or Slurm's queue."""

    @property
    def kind(self) -> str: ...

    def liveness(self, intent: Intent | None, claim: Claim | None) -> tuple[Liveness, str]: ...


def observe_attempt(paths: RunPaths, attempt: int, *, probe: Probe, now_unix: float) -> AttemptObservation:
    """The newest attempt, judged by the launcher of its run; another launcher's attempt is unknown to it."""
    intent, claim, problem = read_attempt(paths, attempt)
    if problem is not None:
        return AttemptObservation(attempt=attempt, liveness=Liveness.UNKNOWN, why=problem)
    if intent is not None and intent.launcher not in (probe.kind, "unknown"):
        liveness, why = Liveness.UNKNOWN, f"it was launched by {intent.launcher}, and {probe.kind} was asked"
    else:
        liveness, why = probe.liveness(intent, claim)
    return AttemptObservation(
        attempt=attempt,
        liveness=liveness,
        why=why,
        intent=intent,
        claim=claim,
        age_s=_age_s(paths, attempt, intent, now_unix),
    )


def _age_s(paths: RunPaths, attempt: int, intent: Intent | None, now_unix: float) -> float | None:
    """Since the attempt was taken. A controller that died before the intent leaves only the folder's time."""
    try:
        since = intent.created_unix if intent is not None else paths.attempt(attempt).stat().st_mtime
    except OSError:
        return None
    return max(0.0, now_unix - since)


def observe_run(paths: RunPaths, *, launcher: Probe, clock: Clock, commits_that_reset: int = 2) -> RunLook:
    """Read everything that decide_run needs. `launcher` is the run's: it knows what still runs."""
    now_unix = clock.now_unix()
    view = read_ledger(paths.root)
    problems = list(view.unread)
    entries, fences, newest = scan_checkpoints(paths), read_fences(paths), newest_attempt(paths)
    if entries is None or fences is None or newest is None:
        problems.append("checkpoints/ or attempts/: cannot be listed")
    facts = parse_launch_facts(read_text(paths.launch_facts))
    if isinstance(facts, Unreadable):
        problems.append(f"launch_facts.json: {facts.why}")
    run = None if isinstance(facts, Unreadable) else facts.run
    events = with_unrecorded_checkpoints(view.events, entries or ())
    history = replay(events, commits_that_reset=commits_that_reset)
    requests, unclear = read_requests(paths)
    seen = RunObservation(
        now_unix=now_unix,
        launcher=launcher.kind,
        train_steps=None if isinstance(facts, Unreadable) else facts.train_steps,
        last=observe_attempt(paths, newest, probe=launcher, now_unix=now_unix) if newest else None,
        counting=count(entries or (), fences or (), run=run),
        requests=open_requests(requests, history),
        problems=(*problems, *(why for why in unclear if why.startswith("control/:"))),
    )
    return RunLook(seen=seen, history=history, num_events=len(view.events))
