"""Six lines about a run, in the order a person asks: what happened, what pawl did, what it cost, how it stands, what
to do now (the exact command), and where the evidence lies. Pure: RunView → text.
"""

import shlex
from dataclasses import asdict, dataclass

from orchestrator.views.human import duration, harmless, moment, number, plural, rate, ratio
from orchestrator.views.passed_over import passed_over_text
from orchestrator.views.records import AttemptView, DecisionView, IncidentView, RequestView, RunState, RunView

TITLES = ("What happened", "What pawl did", "What it cost", "State now", "What you can do", "Evidence")


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The six answers, one line each."""

    what_happened: str
    what_pawl_did: str
    what_it_cost: str
    state_now: str
    what_you_can_do: str
    evidence: str

    @property
    def lines(self) -> tuple[str, ...]:
        return (
            self.what_happened,
            self.what_pawl_did,
            self.what_it_cost,
            self.state_now,
            self.what_you_can_do,
            self.evidence,
        )


def explanation(view: RunView) -> Explanation:
    """The six answers for a run in any state, never-started ones included."""
    return Explanation(
        what_happened=_happened(view),
        what_pawl_did=_did(view),
        what_it_cost=_cost(view),
        state_now=_state(view),
        what_you_can_do=_todo(view),
        evidence=_evidence(view),
    )


def text(view: RunView) -> str:
    """The six lines with their titles, aligned."""
    width = max(map(len, TITLES))
    answers = explanation(view).lines
    return "\n".join(f"{title:<{width}}  {_one_line(line)}" for title, line in zip(TITLES, answers, strict=True))


def to_json(view: RunView) -> dict[str, str]:
    """The six answers by name, as JSON data."""
    return asdict(explanation(view))


def place(incident: IncidentView) -> str:
    """Where it happened: "rank 1 on node0, phase step, step 45"; "" when nothing is known."""
    where = [f"rank {incident.rank}"] if incident.rank is not None else []
    if incident.node is not None:
        where = [f"{where[0]} on {incident.node}"] if where else [incident.node]
    if incident.phase is not None:
        where.append(f"phase {incident.phase.lower()}")
    if incident.step is not None:
        where.append(f"step {incident.step}")
    return ", ".join(where)


def action_words(decision: DecisionView) -> str:
    """A decision as a sentence without subject: "started a new cycle (L2) without node1, from step-…"."""
    if is_parting(decision):
        # The ledger's word for it is a hold, but nobody waits: the run's own user ended it.
        return f"left the run {decision.rule}, as a person asked"
    what = _ACTIONS.get(decision.action or "", decision.action or "decided")
    level = f" ({decision.level})" if decision.level else ""
    without = f" without {', '.join(decision.exclude)}" if decision.exclude else ""
    source = f" from {decision.resume_from}" if decision.resume_from else ""
    wait = f" after {duration(decision.backoff_s)}" if decision.backoff_s else ""
    return f"{what}{level}{without}{source}{wait}"


_ACTIONS = {
    "start": "started the ranks",
    "restart": "restarted the ranks",
    "new_cycle": "restarted the ranks",
    "wait": "waited",
    "note": "noted it",
    "drain": "asked for a checkpoint and an orderly stop",
    "save": "asked for a checkpoint",
    "profile": "asked for a profile",
    "finish": "ended the run: it is complete",
    "end": "ended the attempt",
    "hold": "stopped relaunching (HELD)",
    "fail": "stopped the run (FAILED)",
    "cancel": "cancelled the run",
    "launch": "launched a new attempt",
    "abandon": "gave the attempt up",
}


def is_parting(decision: DecisionView) -> bool:
    """The controller parked a run that a person drained or cancelled."""
    return decision.action == "hold" and decision.rule in _PARTINGS.values()


_PARTINGS = {"drain": "drained", "cancel": "cancelled"}
_ENDED_BY_A_PERSON = {RunState.DRAINED: "drain", RunState.CANCELLED: "cancel"}


def _parting(view: RunView) -> RequestView | None:
    """The request that ended a drained or cancelled run, as far as it is recorded."""
    verb = _ENDED_BY_A_PERSON.get(view.state)
    return next((request for request in reversed(view.requests) if request.verb == verb), None)


def _parted(view: RunView) -> str:
    """Who or what ended a run that ended at a person's word."""
    request = _parting(view)
    before = f" ({plural(len(view.incidents), 'incident')} before)" if view.incidents else ""
    if request is None:
        return f"A person {_PARTINGS[_ENDED_BY_A_PERSON[view.state]]} the run; who is not recorded{before}."
    who, when = request.by or "a person whose name is not recorded", moment(request.unix)
    return f"{who} asked the run to {request.verb}, {when} (request {request.id}){before}."


def _parting_done(view: RunView) -> str:
    request, newest = _parting(view), view.newest_checkpoint
    rule = f" [{view.attempts[-1].rule}]" if view.attempts and view.attempts[-1].rule else ""
    if not view.attempts:
        return "Did not launch it: no attempt was made."
    if view.state is RunState.CANCELLED and view.cycles:
        return f"Ended the ranks at once, without a checkpoint{rule}"
    if view.state is RunState.CANCELLED:
        return f"Ended attempt {view.attempts[-1].attempt}, which had started no rank yet{rule}"
    asked = None if request is None else request.unix
    committed = None if newest is None else newest.committed_unix
    if newest is not None and asked is not None and committed is not None and committed >= asked:
        return f"Wrote {newest.name} and ended attempt {view.attempts[-1].attempt}{rule}"
    return f"Ended attempt {view.attempts[-1].attempt}; no checkpoint was written after the request{rule}"


def _goes_on_from(view: RunView) -> str:
    """What a resume would start from."""
    if view.newest_checkpoint is not None:
        return f"goes on from {view.newest_checkpoint.name}"
    return "starts from the beginning: there is no checkpoint that counts"


def _lost(view: RunView) -> AttemptView | None:
    """The newest attempt that ended without a word, when nothing went wrong since: no incident tells of it."""
    if view.state in _ENDED_BY_A_PERSON:
        return None
    newest = view.attempts[-1] if view.attempts and view.state is RunState.LOST else None
    lost = newest or next((attempt for attempt in reversed(view.attempts) if attempt.outcome == "lost"), None)
    if lost is None or (view.incidents and view.incidents[-1].epoch > f"a{lost.attempt + 1:04d}"):
        return None
    return lost


def _incident(view: RunView) -> IncidentView | None:
    """The newest thing that went wrong, None when that is a lost attempt, a person's word or nothing."""
    if view.state in _ENDED_BY_A_PERSON:
        return None
    return view.incidents[-1] if view.incidents and _lost(view) is None else None


def _happened(view: RunView) -> str:
    if view.state is RunState.UNKNOWN:
        return f"Not known: {view.state_reason}."
    if view.state in _ENDED_BY_A_PERSON:
        return _parted(view)
    if (lost := _lost(view)) is not None:
        return f"attempt {lost.attempt} was lost: {lost.reason or view.state_reason or 'no reason is known'}"
    more = tuple(text for text in (passed_over_text(view), *view.lost_spares) if text)
    if not view.incidents and not more:
        return "The run was never started." if not view.attempts else "Nothing went wrong so far."
    before = [item for item in view.incidents if item.epoch < f"a{len(view.attempts):04d}"]
    if not view.incidents or (more and len(before) == len(view.incidents)):
        return "; ".join(more) + (f" ({plural(len(before), 'incident')} before)" if before else "")
    incident = view.incidents[-1]
    where = place(incident)
    message = incident.message or "no message"
    count = f" ({plural(len(view.incidents), 'incident')} in all)" if len(view.incidents) > 1 else ""
    said = f"{incident.failure_class or 'unknown'}{': ' + where if where else ''}: {message}{count}"
    return "; ".join((said, *more))


def _did(view: RunView) -> str:
    if view.state in (RunState.HELD, RunState.FAILED) and view.stop is not None:
        return (
            f"Stopped relaunching, because {view.stop.reason or 'of no given reason'} [{view.stop.rule or 'no rule'}]"
        )
    if view.state in _ENDED_BY_A_PERSON:
        return _parting_done(view)
    decision = view.last_decision
    incident = _incident(view)
    if incident is not None and incident.decision is not None:
        decision = incident.decision
    if decision is None and view.state is RunState.UNKNOWN:
        return "Not known."
    if decision is None:
        return "Nothing yet." if not view.attempts else f"Launched {plural(len(view.attempts), 'attempt')}."
    words = action_words(decision)
    because = f", because {decision.reason}" if decision.reason else ""
    return f"{words[0].upper()}{words[1:]}{because} [{decision.rule or 'no rule'}]"


def _cost(view: RunView) -> str:
    if view.state is RunState.UNKNOWN:
        return "Not known."
    incident = _incident(view)
    if _lost(view) is not None:
        return "Not measured: whoever measures it was lost too. `pawl status` shows where the wall time went."
    if incident is None:
        return "Nothing."
    if incident.cost is None and view.state is RunState.DONE:
        return "Nothing more: the last checkpoint was there already."
    if incident.cost is None:
        return "It ended the training." if view.state.is_over else "Not settled: training has not gone on since."
    cost = incident.cost
    parts = (
        ("detection", cost.detection_s),
        ("teardown", cost.teardown_s),
        ("back-off", cost.backoff_s or None),
        ("start", cost.start_s),
        ("load", cost.load_s),
    )
    named = " + ".join(f"{name} {duration(value)}" for name, value in parts if value is not None)
    steps = "" if cost.lost_steps is None else f"; {plural(cost.lost_steps, 'step')} trained again"
    how = f"({named})" if named else "from the fault to the first step of a later attempt"
    return f"{duration(cost.total_s)} {how}{steps}"


def _state(view: RunView) -> str:
    progress = view.progress
    of = f" of {progress.train_steps:,}" if progress.train_steps is not None else ""
    step = "no step yet" if progress.step is None else f"step {progress.step:,}{of}"
    facts = [str(view.state).upper(), step]
    if not progress.stale:
        facts += [f"loss {number(progress.loss)}", rate(progress.tokens_per_s)]
        if progress.eta_s is not None:
            facts.append(f"{duration(progress.eta_s)} to go")
    if view.goodput.productive_ratio is not None:
        facts.append(f"goodput {ratio(view.goodput.productive_ratio)}")
    if view.lineage is not None:
        facts.append(f"forked from {view.lineage.text}")
    if view.copies is not None and view.copies.failed:
        facts.append("; ".join(view.copies.failed))
    tail = f" ({view.state_reason})" if view.state_reason else ""
    return ", ".join(facts) + tail


def _todo(view: RunView) -> str:
    run = shlex.quote(view.run)
    hint = view.stop.hint if view.stop is not None else None
    match view.state:
        case RunState.HELD:
            return f"{_sentence(hint)}`pawl resume {run}` when the cause is gone."
        case RunState.FAILED:
            return f"{_sentence(hint)}Then `pawl resume {run} --set section.key=value` (or `--code current`)."
        case RunState.DONE:
            return f"`pawl export {run} --out DIR` for the model, `pawl report {run}` for the page."
        case RunState.DRAINED | RunState.CANCELLED:
            return f"`pawl resume {run}` {_goes_on_from(view)}."
        case RunState.CREATED | RunState.LOST:
            return "`pawl controller --once` looks at it and goes on."
        case RunState.QUEUED if view.attempts and view.attempts[-1].outcome is not None:
            # Nothing of this run is left to start it, and whether a controller runs cannot be seen from here.
            return "Nothing where a `pawl controller` runs; else `pawl controller --once` starts the next attempt."
        case RunState.QUEUED:
            return f"Nothing: it starts by itself. `pawl watch {run}` shows it; `pawl cancel {run}` gives it up."
        case RunState.UNKNOWN:
            return f"Repair or restore {view.run_dir}/ledger; `pawl status {run}` lists what cannot be read."
        case _:
            return f"Nothing: it goes on by itself. `pawl watch {run}` shows it, `pawl drain {run}` stops it in order."


def _sentence(hint: str | None) -> str:
    return f"{hint[0].upper()}{hint[1:].rstrip('.')}. " if hint else ""


def _evidence(view: RunView) -> str:
    incident = _incident(view)
    if (lost := _lost(view)) is not None:
        return f"{view.run_dir}/attempts/{lost.attempt:04d}/"
    if incident is not None and incident.evidence:
        return ", ".join(f"{view.run_dir}/{path}" for path in incident.evidence[:3])
    if incident is not None:
        attempt, cycle = incident.epoch[1:5], incident.epoch.rpartition("c")[2]
        return f"{view.run_dir}/attempts/{attempt}/cycles/{cycle}/"
    return f"{view.run_dir}/ledger/" + (" and attempts/" if view.attempts else "")


def _one_line(text: str) -> str:
    return " ".join(harmless(text).split())
