"""The ledger replayed: events → History. Pure and total: any prefix, any order of writers, any missing field replays.

Two counters carry the promise that recovery is bounded. *Progress* is a committed checkpoint at a step higher than any
before: a checkpoint that was quarantined and trained again is none. Everything that counts failures is counted since
the last progress, and `resumed` (a person's word) starts all of it anew.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from orchestrator.state.counting import CheckpointEntry
from orchestrator.state.epochs import Epoch
from orchestrator.state.records import Event
from orchestrator.state.rundir import CheckpointName, EntryKind, classify_entry


class RunState(StrEnum):
    """Where a run stands, as far as its ledger tells."""

    NEW = "new"
    LAUNCHING = "launching"
    STARTING = "starting"
    RUNNING = "running"
    RECOVERING = "recovering"
    STOPPED = "stopped"
    COMPLETED = "completed"
    HELD = "held"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptHistory:
    """One attempt as the ledger tells it; None where it does not."""

    attempt: int
    nonce: str | None = None
    launcher: str | None = None
    exclude: tuple[str, ...] = ()
    job_id: str | None = None
    pid: int | None = None
    intent_unix: float | None = None
    started_unix: float | None = None
    num_cycles: int = 0
    outcome: str | None = None
    reason: str = ""
    rule: str | None = None
    ended_unix: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleHistory:
    """One cycle as the ledger tells it. `running_step`: the first step that it completed."""

    epoch: Epoch
    nodes: tuple[str, ...] = ()
    resume_from: str | None = None
    started_unix: float | None = None
    running_step: int | None = None
    outcome: str | None = None
    exit_code: int | None = None
    last_step: int | None = None
    ended_unix: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentHistory:
    """One classified abnormal event. `cls` and `level` are the ledger's text, so unknown ones replay too."""

    id: str
    epoch: Epoch
    cls: str
    rule: str
    level: str | None
    node: str | None
    rank: int | None
    phase: str | None
    step: int | None
    fingerprint: str
    message: str
    evidence: tuple[str, ...]
    fault_unix: float | None
    unix: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LastDecision:
    """The newest decision in the ledger."""

    rule: str
    action: str
    level: str | None
    reason: str
    backoff_s: float
    exclude: tuple[str, ...]
    unix: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked:
    """Why the run is HELD or FAILED."""

    rule: str
    reason: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A run's past. `unresolved`: incidents since the last progress; `streak`: restarts that the backoff counts.

    `cycles_without_progress` counts started cycles, and attempts that ended without starting one. `may_start_over`: a
    person said that the run may begin again at step 1, and no checkpoint was written since.
    """

    run: str | None = None
    world_size: int | None = None
    state: RunState = RunState.NEW
    attempts: tuple[AttemptHistory, ...] = ()
    cycles: tuple[CycleHistory, ...] = ()
    incidents: tuple[IncidentHistory, ...] = ()
    unresolved: tuple[IncidentHistory, ...] = ()
    best_step: int = 0
    ever_stepped: bool = False
    cycles_without_progress: int = 0
    streak: int = 0
    commits_since_restart: int = 0
    last_decision: LastDecision | None = None
    parked: Parked | None = None
    quarantined: tuple[str, ...] = ()
    requests_done: tuple[str, ...] = ()
    resumed_unix: float | None = None
    resumed_attempt: int | None = None
    may_start_over: bool = False
    last_epoch: Epoch = field(default_factory=lambda: Epoch(0, 0, 0))

    @property
    def last_attempt(self) -> AttemptHistory | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def first_error(self) -> IncidentHistory | None:
        """The incident that began the present trouble: what a person should read first."""
        return self.unresolved[0] if self.unresolved else None


def replay(events: Iterable[Event], *, commits_that_reset: int = 2) -> History:
    """The history that the events tell, in their merged order."""
    state = _Replay(commits_that_reset=commits_that_reset)
    for event in sorted(events, key=lambda event: event.order):
        state.apply(event)
    return state.history()


def with_unrecorded_checkpoints(events: Iterable[Event], entries: Iterable[CheckpointEntry]) -> tuple[Event, ...]:
    """The events and a commit for every whole checkpoint on disk that the ledger does not know.

    A supervisor killed between the trainer's rename and its own ledger line must not cost the run its progress.
    """
    known = tuple(events)
    recorded = {event.data.get("name") for event in known if event.kind == "checkpoint_committed"}
    missing = []
    for entry in entries:
        kind, name = classify_entry(entry.entry)
        if kind is EntryKind.COMMITTED and name is not None and entry.defect is None and name.text not in recorded:
            missing.append(_commit(name, known))
    return tuple(sorted((*known, *missing), key=lambda event: event.order))


def _commit(name: CheckpointName, known: tuple[Event, ...]) -> Event:
    # Behind everything its own cycle wrote, before the next cycle: where the line would have stood at the latest.
    seq = max((event.seq for event in known if event.epoch == name.epoch), default=0) + 1
    unix = max((event.unix for event in known if event.epoch <= name.epoch), default=0.0)
    data = {"name": name.text, "step": name.step, "bytes": None}
    return Event(epoch=name.epoch, seq=seq, writer="observed", unix=unix, kind="checkpoint_committed", data=data)


class _Replay:
    """The fold. One method per kind of event; kinds it does not know change nothing."""

    def __init__(self, *, commits_that_reset: int) -> None:
        self.commits_that_reset = commits_that_reset
        self.attempts: dict[int, AttemptHistory] = {}
        self.cycles: dict[Epoch, CycleHistory] = {}
        self.incidents: list[IncidentHistory] = []
        self.unresolved: list[IncidentHistory] = []
        self.values: dict[str, Any] = {}
        self.best_step = 0
        self.idle_cycles = 0
        self.streak = 0
        self.commits = 0
        self.quarantined: list[str] = []
        self.done: list[str] = []
        self.last_epoch = Epoch(0, 0, 0)

    def apply(self, event: Event) -> None:
        self.last_epoch = max(self.last_epoch, event.epoch)
        handler = getattr(self, f"on_{event.kind}", None)
        if handler is not None:
            handler(event, event.data)

    def history(self) -> History:
        return History(
            attempts=tuple(self.attempts[n] for n in sorted(self.attempts)),
            cycles=tuple(self.cycles[epoch] for epoch in sorted(self.cycles)),
            incidents=tuple(self.incidents),
            unresolved=tuple(self.unresolved),
            best_step=self.best_step,
            cycles_without_progress=self.idle_cycles,
            streak=self.streak,
            commits_since_restart=self.commits,
            quarantined=tuple(self.quarantined),
            requests_done=tuple(self.done),
            last_epoch=self.last_epoch,
            **self.values,
        )

    def _attempt(self, number: int, **changes: Any) -> AttemptHistory:
        attempt = replace(self.attempts.get(number, AttemptHistory(attempt=number)), **changes)
        self.attempts[number] = attempt
        return attempt

    def _cycle(self, epoch: Epoch, **changes: Any) -> None:
        self.cycles[epoch] = replace(self.cycles.get(epoch, CycleHistory(epoch=epoch)), **changes)

    def _state(self, state: RunState) -> None:
        if self.values.get("state") not in (RunState.COMPLETED, RunState.HELD, RunState.FAILED):
            self.values["state"] = state

    def on_run_created(self, event: Event, data: dict[str, Any]) -> None:
        self.values["run"] = _text(data.get("run"))
        self.values["world_size"] = _int(data.get("world_size"))

    def on_attempt_intent(self, event: Event, data: dict[str, Any]) -> None:
        self._attempt(
            _int(data.get("attempt")) or event.epoch.attempt,
            nonce=_text(data.get("nonce")),
            launcher=_text(data.get("launcher")),
            exclude=_texts(data.get("exclude")),
            intent_unix=event.unix,
        )
        self._state(RunState.LAUNCHING)

    def on_attempt_submitted(self, event: Event, data: dict[str, Any]) -> None:
        job_id = data.get("job_id")
        number = _int(data.get("attempt")) or event.epoch.attempt
        self._attempt(number, job_id=None if job_id is None else str(job_id), pid=_int(data.get("pid")))

    def on_attempt_started(self, event: Event, data: dict[str, Any]) -> None:
        self._attempt(event.epoch.attempt, started_unix=event.unix)
        self._state(RunState.STARTING)

    def on_attempt_ended(self, event: Event, data: dict[str, Any]) -> None:
        number = _int(data.get("attempt")) or event.epoch.attempt
        before = self._attempt(number)
        if before.outcome is not None:
            return  # the supervisor's own word stands against a later "lost" of a controller
        outcome = _text(data.get("outcome"))
        words = {"reason": _text(data.get("reason")) or "", "rule": _text(data.get("rule"))}
        self._attempt(number, outcome=outcome, ended_unix=event.unix, **words)
        if before.num_cycles == 0 and outcome in ("lost", "continue"):
            self.idle_cycles += 1
        if outcome == "lost":
            self._restarting()
        self._state(RunState.STOPPED)

    def on_cycle_started(self, event: Event, data: dict[str, Any]) -> None:
        self._cycle(
            event.epoch,
            nodes=_texts(data.get("nodes")),
            resume_from=_text(data.get("resume_from")),
            started_unix=event.unix,
        )
        self._attempt(event.epoch.attempt, num_cycles=self._attempt(event.epoch.attempt).num_cycles + 1)
        self.idle_cycles += 1
        self._state(RunState.STARTING)

    def on_cycle_running(self, event: Event, data: dict[str, Any]) -> None:
        self._cycle(event.epoch, running_step=_int(data.get("step")))
        self.values["ever_stepped"] = True
        self._state(RunState.RUNNING)

    def on_cycle_ended(self, event: Event, data: dict[str, Any]) -> None:
        self._cycle(
            event.epoch,
            outcome=_text(data.get("outcome")),
            exit_code=_int(data.get("exit_code")),
            last_step=_int(data.get("step")),
            ended_unix=event.unix,
        )

    def on_incident(self, event: Event, data: dict[str, Any]) -> None:
        incident = IncidentHistory(
            id=_text(data.get("id")) or f"{event.epoch.text}-{event.seq}",
            epoch=event.epoch,
            cls=_text(data.get("class")) or "unknown",
            rule=_text(data.get("rule")) or "",
            level=_text(data.get("level")),
            node=_text(data.get("node")),
            rank=_int(data.get("rank")),
            phase=_text(data.get("phase")),
            step=_int(data.get("step")),
            fingerprint=_text(data.get("fingerprint")) or "",
            message=_text(data.get("message")) or "",
            evidence=_texts(data.get("evidence")),
            fault_unix=_float(data.get("fault_unix")),
            unix=event.unix,
        )
        self.incidents.append(incident)
        self.unresolved.append(incident)
        self._restarting()
        self._state(RunState.RECOVERING)

    def _restarting(self) -> None:
        self.streak += 1
        self.commits = 0

    def on_decision(self, event: Event, data: dict[str, Any]) -> None:
        self.values["last_decision"] = LastDecision(
            rule=_text(data.get("rule")) or "",
            action=_text(data.get("action")) or "",
            level=_text(data.get("level")),
            reason=_text(data.get("reason")) or "",
            backoff_s=_float(data.get("backoff_s")) or 0.0,
            exclude=_texts(data.get("exclude")),
            unix=event.unix,
        )

    def on_checkpoint_committed(self, event: Event, data: dict[str, Any]) -> None:
        self.values["may_start_over"] = False
        step = _int(data.get("step"))
        if step is None or step <= self.best_step:
            return
        self.best_step = step
        self.idle_cycles = 0
        self.unresolved.clear()
        self.commits += 1
        if self.commits >= self.commits_that_reset:
            self.streak = 0

    def on_checkpoint_quarantined(self, event: Event, data: dict[str, Any]) -> None:
        name = _text(data.get("name"))
        if name is not None:
            self.quarantined.append(name)

    def on_request_done(self, event: Event, data: dict[str, Any]) -> None:
        self.done.extend(_texts([data.get("id")]))

    def on_run_done(self, event: Event, data: dict[str, Any]) -> None:
        self.values["state"] = RunState.COMPLETED

    def on_run_held(self, event: Event, data: dict[str, Any]) -> None:
        self._park(RunState.HELD, data)

    def on_run_failed(self, event: Event, data: dict[str, Any]) -> None:
        self._park(RunState.FAILED, data)

    def _park(self, state: RunState, data: dict[str, Any]) -> None:
        if self.values.get("state") is RunState.COMPLETED:
            return
        self.values["state"] = state
        words = {key: _text(data.get(key)) or "" for key in ("rule", "reason", "hint")}
        self.values["parked"] = Parked(**words)

    def on_resumed(self, event: Event, data: dict[str, Any]) -> None:
        if self.values.get("state") is not RunState.COMPLETED:
            self.values["state"] = RunState.STOPPED
        self.values["parked"] = None
        self.values["resumed_unix"] = event.unix
        self.values["may_start_over"] = data.get("from_start") is True
        self.values["resumed_attempt"] = max(self.attempts, default=0)
        self.idle_cycles = self.streak = self.commits = 0
        self.unresolved.clear()


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _float(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _texts(value: object) -> tuple[str, ...]:
    return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list | tuple) else ()
