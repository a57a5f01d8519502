"""The parts of a RunView, each a pure function of history and events."""

from collections.abc import Iterable, Sequence
from typing import Any

from orchestrator.state.counting import Counting, resume_step
from orchestrator.state.epochs import Epoch
from orchestrator.state.history import AttemptHistory, History, IncidentHistory
from orchestrator.state.history import RunState as LedgerState
from orchestrator.state.records import Cycle, Event, Request
from orchestrator.state.rundir import CheckpointName, EntryKind, classify_entry
from orchestrator.state.train_lines import finite
from orchestrator.views.records import (
    AttemptView,
    CheckpointView,
    CostView,
    CycleView,
    DecisionView,
    IncidentView,
    LineageView,
    NodeBeat,
    NodeView,
    RankView,
    RequestView,
    RunState,
    StopView,
)

_LEDGER_STATE = {
    LedgerState.NEW: RunState.CREATED,
    LedgerState.LAUNCHING: RunState.QUEUED,
    LedgerState.STARTING: RunState.STARTING,
    LedgerState.RUNNING: RunState.TRAINING,
    LedgerState.RECOVERING: RunState.RECOVERING,
    LedgerState.COMPLETED: RunState.DONE,
    LedgerState.HELD: RunState.HELD,
    LedgerState.FAILED: RunState.FAILED,
}
_OUTCOME_STATE = {
    "done": RunState.DONE,
    "drained": RunState.DRAINED,
    "cancelled": RunState.CANCELLED,
    "held": RunState.HELD,
    "failed": RunState.FAILED,
}
_PARKED_STATE = {"drained": RunState.DRAINED, "cancelled": RunState.CANCELLED}
_LIVE = {RunState.STARTING, RunState.TRAINING, RunState.RECOVERING}
SILENCE_INTERVALS = 3


def state_of(
    history: History, events: Sequence[Event], supervisor_alive: bool | None, unread: Sequence[str] = ()
) -> tuple[RunState, str | None]:
    """(state, one sentence why, if there is one to say). `unread`: parts of the ledger that could not be read."""
    if unread:
        # What that writer said may be the run's end: the rest alone would tell of a run that waits or trains.
        return RunState.UNKNOWN, f"{unread[0]}, so what it says is not known"
    if not events:
        return RunState.UNKNOWN, "its ledger holds nothing that can be read"
    state = _LEDGER_STATE.get(history.state)
    attempt = history.last_attempt
    if state is None:
        state = _stopped(attempt, events)
    if state in _LIVE and supervisor_alive is False:
        return RunState.LOST, "its supervisor is gone and left no word; `pawl controller --once` finds out and goes on"
    if state is RunState.QUEUED and attempt is not None and attempt.outcome is not None:
        return state, f"attempt {attempt.attempt} ended ({attempt.outcome}); the next one is not there yet"
    if history.parked is not None:
        return _PARKED_STATE.get(history.parked.rule, state), history.parked.reason
    return state, (attempt.reason or None) if attempt is not None and state.is_over else None


def _stopped(attempt: AttemptHistory | None, events: Sequence[Event]) -> RunState:
    last = next((e.kind for e in reversed(events) if e.kind in ("attempt_ended", "resumed", "run_created")), None)
    if last != "attempt_ended" or attempt is None:
        return RunState.QUEUED if last == "resumed" else RunState.CREATED
    return _OUTCOME_STATE.get(attempt.outcome or "", RunState.QUEUED)


def stop_of(history: History, state: RunState) -> StopView | None:
    """Why a run that is over is over."""
    if not state.is_over:
        return None
    if history.parked is not None:
        # Where a drained or cancelled run goes on is for the reader to say, who sees its checkpoints as they are now.
        hint = None if history.parked.rule in _PARKED_STATE else history.parked.hint or None
        return StopView(rule=history.parked.rule, reason=history.parked.reason, hint=hint)
    attempt = history.last_attempt
    return None if attempt is None else StopView(rule=attempt.rule, reason=attempt.reason or None, hint=None)


def attempts_of(history: History, events: Iterable[Event]) -> tuple[AttemptView, ...]:
    hosts = {e.epoch.attempt: e.data for e in events if e.kind == "attempt_started"}
    return tuple(
        AttemptView(
            attempt=attempt.attempt,
            launcher=attempt.launcher,
            job_id=attempt.job_id,
            host=hosts.get(attempt.attempt, {}).get("host"),
            pid=hosts.get(attempt.attempt, {}).get("pid", attempt.pid),
            submitted_unix=attempt.intent_unix,
            started_unix=attempt.started_unix,
            ended_unix=attempt.ended_unix,
            outcome=attempt.outcome,
            rule=attempt.rule,
            reason=attempt.reason or None,
        )
        for attempt in history.attempts
    )


def cycles_of(history: History, events: Iterable[Event]) -> tuple[CycleView, ...]:
    running = {event.epoch: event.unix for event in events if event.kind == "cycle_running"}
    return tuple(
        CycleView(
            epoch=cycle.epoch.text,
            started_unix=cycle.started_unix or 0.0,
            ended_unix=cycle.ended_unix,
            first_step_unix=running.get(cycle.epoch),
            nodes=cycle.nodes,
            resume_from=cycle.resume_from,
            outcome=cycle.outcome,
            last_step=cycle.last_step,
        )
        for cycle in history.cycles
        if cycle.started_unix is not None
    )


def decisions_of(events: Iterable[Event]) -> tuple[DecisionView, ...]:
    return tuple(_decision(event) for event in events if event.kind == "decision")


def _decision(event: Event) -> DecisionView:
    return DecisionView(
        unix=event.unix,
        epoch=event.epoch.text,
        rule=_text(event.data.get("rule")),
        action=_text(event.data.get("action")),
        level=_text(event.data.get("level")),
        reason=_text(event.data.get("reason")),
        backoff_s=finite(event.data.get("backoff_s")),
        exclude=_texts(event.data.get("exclude")),
        resume_from=_text(event.data.get("resume_from")),
    )


def incidents_of(
    history: History, events: Iterable[Event], decisions: Sequence[DecisionView]
) -> tuple[IncidentView, ...]:
    """Incidents in the order they were noticed, each with its cost once recovered and the decision that followed.

    The supervisor that saw the fault measures the recovery; where its attempt ended with the fault, the first step of
    the next attempt tells when it was over.
    """
    known = tuple(events)
    measured = {_text(event.data.get("incident")): event for event in known if event.kind == "recovered"}
    stepped = {event.epoch: event.unix for event in known if event.kind == "cycle_running"}
    views = []
    for place, incident in enumerate(history.incidents):
        said = measured.get(incident.id)
        over = (said.unix, _cost(said.data)) if said else None
        following = history.incidents[place + 1] if place + 1 < len(history.incidents) else None
        views.append(_incident(incident, over or _in_a_later_attempt(incident, following, history, stepped), decisions))
    return tuple(views)


def _in_a_later_attempt(
    incident: IncidentHistory, following: IncidentHistory | None, history: History, stepped: dict[Epoch, float]
) -> tuple[float, CostView] | None:
    """(when it was over, its cost) by the first cycle of a later attempt that trained before the next incident."""
    later = next((c for c in history.cycles if c.epoch > incident.epoch and c.epoch in stepped), None)
    if later is None or later.epoch.attempt == incident.epoch.attempt:
        return None
    if following is not None and following.epoch < later.epoch:
        return None
    failed = next((c for c in history.cycles if c.epoch == incident.epoch), None)
    reached, resumed = failed.last_step if failed else None, resume_step(later.resume_from)
    if failed is not None and reached is not None:
        reached = max(reached, resume_step(failed.resume_from) or 0)
    lost = None if reached is None or resumed is None else max(0, reached - resumed)
    since = incident.unix if incident.fault_unix is None else incident.fault_unix
    parts = dict.fromkeys(("detection_s", "teardown_s", "backoff_s", "start_s", "load_s"))
    total_s = max(0.0, stepped[later.epoch] - since)
    return stepped[later.epoch], CostView(**parts, total_s=total_s, lost_steps=lost)


def _incident(
    incident: IncidentHistory, over: tuple[float, CostView] | None, decisions: Sequence[DecisionView]
) -> IncidentView:
    return IncidentView(
        id=incident.id,
        unix=incident.unix,
        epoch=incident.epoch.text,
        failure_class=incident.cls,
        rule=incident.rule or None,
        level=incident.level,
        node=incident.node,
        rank=incident.rank,
        phase=incident.phase,
        step=incident.step,
        message=incident.message or None,
        evidence=incident.evidence,
        fault_unix=incident.fault_unix,
        recovered_unix=over[0] if over else None,
        cost=over[1] if over else None,
        decision=next((d for d in decisions if d.unix >= incident.unix), None),
    )


def _cost(data: dict[str, Any]) -> CostView:
    lost = data.get("lost_steps")
    return CostView(
        detection_s=finite(data.get("detection_s")),
        teardown_s=finite(data.get("teardown_s")),
        backoff_s=finite(data.get("backoff_s")),
        start_s=finite(data.get("start_s")),
        load_s=finite(data.get("load_s")),
        total_s=finite(data.get("total_s")),
        lost_steps=lost if isinstance(lost, int) else None,
    )


def lineage_of(events: Iterable[Event]) -> LineageView | None:
    """Where a forked run comes from; None for a run of its own."""
    event = next((event for event in events if event.kind == "forked"), None)
    if event is None:
        return None
    names = ("run", "run_dir", "step", "checkpoint", "digest", "weights_only", "by", "why")
    return LineageView(**{name: event.data.get(name) for name in names}, unix=event.unix)


def checkpoints_of(counting: Counting, events: Iterable[Event]) -> tuple[CheckpointView, ...]:
    """What lies in checkpoints/, newest step first: those that count, and the others with the reason."""
    commits = {_text(e.data.get("name")): e for e in events if e.kind == "checkpoint_committed"}
    quarantined = {
        _text(e.data.get("name")): e.data.get("reason") for e in events if e.kind == "checkpoint_quarantined"
    }
    found = [
        CheckpointView(
            name=item.name,
            step=item.step,
            epoch=item.epoch.text,
            bytes=item.total_bytes,
            committed_unix=commits[item.name].unix if item.name in commits else None,
            counts=True,
            why_not=None,
        )
        for item in counting.counted
    ]
    for report in counting.reported:
        kind, name = classify_entry(report.entry)
        if name is not None and kind is not EntryKind.TRASH:
            said = quarantined.get(name.text) if kind is EntryKind.QUARANTINED else None
            found.append(_discounted(name, commits.get(name.text), f"{report.why}: {said}" if said else report.why))
    return tuple(sorted(found, key=lambda checkpoint: (checkpoint.step, checkpoint.epoch), reverse=True))


def _discounted(name: CheckpointName, commit: Event | None, why: str) -> CheckpointView:
    size = commit.data.get("bytes") if commit else None
    return CheckpointView(
        name=name.text,
        step=name.step,
        epoch=name.epoch.text,
        bytes=size if isinstance(size, int) else None,
        committed_unix=commit.unix if commit else None,
        counts=False,
        why_not=why,
    )


def requests_of(pending: Iterable[Request], events: Iterable[Event]) -> tuple[RequestView, ...]:
    """Requests of people: those in the ledger with their result, and those nobody acted on yet."""
    taken: dict[str, RequestView] = {}
    for event in events:
        key = str(event.data.get("id"))
        verb, by = str(event.data.get("verb")), _text(event.data.get("by"))
        if event.kind == "request":
            taken[key] = RequestView(verb=verb, id=key, by=by, unix=event.unix, result=None)
        elif event.kind == "request_done":
            held = taken.get(key)
            by = by or (held.by if held else None)
            unix = held.unix if held else event.unix
            taken[key] = RequestView(
                verb=verb, id=key, by=by, unix=unix, result=_text(event.data.get("result")) or "done"
            )
    for request in pending:
        if request.id not in taken:
            taken[request.id] = RequestView(
                verb=str(request.verb), id=request.id, by=request.by, unix=request.created_unix, result=None
            )
    return tuple(taken.values())


def nodes_of(
    events: Sequence[Event], cycle: Cycle | None, beats: Sequence[NodeBeat], *, world_size: int | None, running: bool
) -> tuple[NodeView, ...]:
    """The nodes of the newest attempt: training ones in rank order, then the others."""
    started = next((event for event in reversed(events) if event.kind == "cycle_started"), None)
    if started is None:
        return ()
    training = _texts(started.data.get("nodes"))
    spares = _texts(started.data.get("spares"))
    attempt = started.epoch.attempt
    excluded = [
        name
        for event in events
        if event.kind == "decision" and event.epoch.attempt == attempt
        for name in _texts(event.data.get("exclude"))
    ]
    addresses = _addresses(events, attempt)
    interval = cycle.beat_interval_s if cycle else None
    per_node = (world_size // len(training)) if world_size and training else 0
    views = []
    for name in dict.fromkeys((*training, *spares, *excluded)):
        # The ledger's spares are all that do not train, nodes that were swapped out included.
        role = "train" if name in training else "excluded" if name in excluded else "spare"
        beat = next((b for b in beats if b.name == name), None) if running else None
        first_rank = training.index(name) * per_node if role == "train" else None
        views.append(_node(name, role, addresses.get(name), beat, interval, first_rank, per_node))
    return tuple(views)


def _node(
    name: str,
    role: str,
    address: str | None,
    beat: NodeBeat | None,
    interval_s: float | None,
    first_rank: int | None,
    per_node: int,
) -> NodeView:
    age = beat.age_s if beat else None
    known = {rank.rank: rank for rank in beat.ranks} if beat else {}
    ranks = range(first_rank, first_rank + per_node) if first_rank is not None else ()
    return NodeView(
        name=name,
        address=address,
        role=role,
        beat_age_s=age,
        stale=None if age is None or interval_s is None else age > SILENCE_INTERVALS * interval_s,
        ranks=tuple(known.get(rank) or _silent(rank) for rank in ranks),
    )


def _silent(rank: int) -> RankView:
    return RankView(rank=rank, pid=None, phase=None, step=None, beat_age_s=None, phase_age_s=None)


def _addresses(events: Iterable[Event], attempt: int) -> dict[str, str]:
    found: dict[str, str] = {}
    for event in events:
        if event.kind == "attempt_started" and event.epoch.attempt == attempt:
            for node in event.data.get("nodes") or ():
                if isinstance(node, dict) and isinstance(node.get("name"), str):
                    found[node["name"]] = str(node.get("address"))
    return found


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _texts(value: object) -> tuple[str, ...]:
    return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list | tuple) else ()
