"""The controller's rules: does a run need another attempt (L3–L5)? First launch and hundredth relaunch are one path.

    over → parked → unknown → alive → not yet claimed → ended: record, finish, park → pause → launch

Nothing is launched while an earlier attempt may still be active, and unknown is never taken for over.
"""

from dataclasses import dataclass

from orchestrator.decide.budgets import backoff_s, crash_loop
from orchestrator.decide.decision import Action, Decision
from orchestrator.decide.observation import Liveness, RunObservation
from orchestrator.decide.policy import Policy
from orchestrator.decide.rules import Rule
from orchestrator.decide.taxonomy import TABLE, Exclusion, FailureClass, Level
from orchestrator.state.history import AttemptHistory, History, IncidentHistory, RunState
from orchestrator.state.records import Verb

_IDLE_RECHECK_S = 3600.0
_POLL_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """One look of the controller and the run's past."""

    seen: RunObservation
    history: History
    policy: Policy

    @property
    def ended(self) -> AttemptHistory | None:
        """The newest attempt's history, once something is known of it."""
        last = self.seen.last
        if last is None:
            return None
        return next(
            (a for a in self.history.attempts if a.attempt == last.attempt), AttemptHistory(attempt=last.attempt)
        )

    @property
    def last_word(self) -> str | None:
        """How the newest attempt ended, unless a person has resumed the run since: a word is obeyed once."""
        ended, resumed = self.ended, self.history.resumed_attempt
        return None if ended is None or (resumed is not None and ended.attempt <= resumed) else ended.outcome

    def asked(self, verb: Verb) -> bool:
        return any(request.verb is verb for request in self.seen.requests)

    @property
    def resume_from(self) -> str | None:
        newest = self.seen.counting.newest
        return None if newest is None else newest.name


def _decide(action: Action, reason: str, **more: object) -> Decision:
    return Decision(rule="", action=action, reason=reason, **more)  # type: ignore[arg-type]


def _completed(c: RunContext) -> Decision | None:
    if c.history.state is not RunState.COMPLETED:
        return None
    return _decide(Action.WAIT, "the run is complete", recheck_after_s=_IDLE_RECHECK_S)


def _parked(c: RunContext) -> Decision | None:
    if c.history.state not in (RunState.HELD, RunState.FAILED):
        return None
    why = c.history.parked.reason if c.history.parked is not None else ""
    # A run that its user ended is parked as well, but nobody waits for it: "held" would be the wrong word.
    by_a_person = c.history.parked is not None and c.history.parked.rule in ("cancelled", "drained")
    return _decide(Action.WAIT, why if by_a_person else f"{c.history.state}: {why}", recheck_after_s=_IDLE_RECHECK_S)


def _unreadable(c: RunContext) -> Decision | None:
    if not c.seen.problems:
        return None
    return _decide(Action.WAIT, f"not everything could be read: {c.seen.problems[0]}", recheck_after_s=30.0)


def _unknown(c: RunContext) -> Decision | None:
    last = c.seen.last
    if last is None or last.liveness is not Liveness.UNKNOWN:
        return None
    return _decide(Action.WAIT, f"attempt {last.attempt} may still run: {last.why}", recheck_after_s=30.0)


def _alive(c: RunContext) -> Decision | None:
    last = c.seen.last
    if last is None or last.liveness is not Liveness.ALIVE:
        return None
    return _decide(Action.WAIT, f"attempt {last.attempt}: {last.why}", recheck_after_s=_POLL_S)


def _pending(c: RunContext) -> Decision | None:
    last = c.seen.last
    if last is None or last.liveness is not Liveness.PENDING:
        return None
    if last.age_s is None or last.age_s < c.policy.launch_clear_s:
        return _decide(Action.WAIT, f"attempt {last.attempt} was launched and has not begun yet", recheck_after_s=1.0)
    return _decide(
        Action.ABANDON,
        f"attempt {last.attempt} did not begin within {last.age_s:.0f} s; it is claimed, so that it never will",
        attempt=last.attempt,
        outcome="lost",
    )


def _lost(c: RunContext) -> Decision | None:
    last, ended = c.seen.last, c.ended
    if last is None or ended is None or ended.outcome is not None:
        return None
    reason = f"attempt {last.attempt} is over and left no word: {last.why}"
    return _decide(Action.END, reason, attempt=last.attempt, outcome="lost", recheck_after_s=0.0)


def _complete(c: RunContext) -> Decision | None:
    ended, newest = c.ended, c.seen.counting.newest
    reached = newest is not None and c.seen.train_steps is not None and newest.step >= c.seen.train_steps
    if not reached and (ended is None or ended.outcome != "done"):
        return None
    reason = (
        f"the checkpoint of step {newest.step} counts" if reached and newest is not None else "the attempt says done"
    )
    return _decide(Action.FINISH, reason, recheck_after_s=_IDLE_RECHECK_S)


def _cancelled(c: RunContext) -> Decision | None:
    if not c.asked(Verb.CANCEL) and c.last_word != "cancelled":
        return None
    return _hold("a person cancelled the run", "`pawl resume RUN` goes on from the newest checkpoint")


def _drained(c: RunContext) -> Decision | None:
    if not c.asked(Verb.DRAIN) and c.last_word != "drained":
        return None
    return _hold("a person asked the run to drain", "`pawl resume RUN` goes on from the newest checkpoint")


def _hold(reason: str, hint: str) -> Decision:
    return _decide(Action.HOLD, reason, level=Level.L5, hint=hint, recheck_after_s=_IDLE_RECHECK_S)


def _attempt_parked(c: RunContext) -> Decision | None:
    """The supervisor parked the run and died before the ledger said so."""
    ended = c.ended
    if ended is None or c.last_word not in ("held", "failed"):
        return None
    hint = "read the reason; `pawl resume RUN` when it is settled"
    if ended.outcome == "held":
        return _hold(ended.reason or "the attempt was held", hint)
    return _decide(Action.FAIL, ended.reason or "the attempt failed", level=Level.L5, hint=hint)


def _undecided(c: RunContext) -> Decision | None:
    if not c.seen.counting.undecided:
        return None
    epoch = c.seen.counting.undecided[0]
    reason = f"the cycle record of {epoch} cannot be read, so it is unknown which checkpoints still count"
    return _hold(reason, f"restore attempts/{epoch.attempt:04d}/cycles/{epoch.cycle:04d}/cycle.json, then resume")


def _crash_loop(c: RunContext) -> Decision | None:
    why = crash_loop(c.history, c.policy)
    if why is None:
        return None
    first = c.history.first_error
    hint = _hint(first) if first is not None else "read the log of the newest attempt"
    return _hold(why, hint)


def _hint(incident: IncidentHistory) -> str:
    known = incident.cls in FailureClass._value2member_map_
    return TABLE[FailureClass(incident.cls if known else "unknown")].hint


def _first(c: RunContext) -> Decision | None:
    if c.seen.last is not None:
        return None
    return _decide(Action.LAUNCH, "no attempt yet", attempt=1, level=Level.L4, resume_from=c.resume_from)


def _backoff(c: RunContext) -> Decision | None:
    ended = c.ended
    if ended is None or ended.ended_unix is None or ended.rule in ("leave", "drained") or c.history.streak == 0:
        return None
    pause = backoff_s(c.history.streak - 1, c.policy)
    waited = c.seen.now_unix - ended.ended_unix
    # A clock that went back must not turn the pause into an endless one.
    left = min(pause, pause - waited)
    if left <= 0:
        return None
    return _decide(Action.WAIT, f"pause of {pause:.0f} s before the next attempt", backoff_s=left, recheck_after_s=left)


def _next(c: RunContext) -> Decision:
    last = c.seen.last
    number = 1 if last is None else last.attempt + 1
    exclude = exclusions(c)
    without = f", without {', '.join(exclude)}" if exclude else ""
    where = f"from {c.resume_from}" if c.resume_from else "from the beginning"
    return _decide(
        Action.LAUNCH,
        f"the attempt before is over: attempt {number} {where}{without}",
        attempt=number,
        level=Level.L4,
        exclude=exclude,
        resume_from=c.resume_from,
    )


def exclusions(c: RunContext) -> tuple[str, ...]:
    """Nodes that the next attempt must not get. Local "nodes" are process trees of this machine: none is excluded."""
    if c.seen.launcher == "local":
        return ()
    recent = [i for i in c.history.incidents if c.seen.now_unix - i.unix <= c.policy.exclude_ttl_s and i.node]
    return tuple(sorted({i.node for i in recent if i.node and _excludes(i)}))


def _excludes(incident: IncidentHistory) -> bool:
    if incident.cls not in FailureClass._value2member_map_:
        return False
    rule = TABLE[FailureClass(incident.cls)].exclude
    return rule is Exclusion.ALWAYS or (rule is Exclusion.RECURRENCE and incident.level in (Level.L2, Level.L4))


RUN_RULES: tuple[Rule[RunContext], ...] = (
    Rule("completed", "the ledger says that the run is done: nothing to do", _completed),
    Rule("parked", "HELD or FAILED: wait for a person", _parked),
    Rule("run-dir-unreadable", "something of the run directory could not be read: wait", _unreadable),
    Rule("attempt-unknown", "the newest attempt may still run: wait", _unknown),
    Rule("attempt-alive", "the newest attempt runs: its supervisor decides", _alive),
    Rule("launch-unclear", "launched but not begun: wait, then claim it so that it never begins", _pending),
    Rule("attempt-lost", "the newest attempt is over without a word: record it as lost", _lost),
    Rule("training-complete", "the last step's checkpoint counts, or the attempt said done", _complete),
    Rule("cancelled", "a person cancelled: HELD", _cancelled),
    Rule("drained", "a person drained: HELD", _drained),
    Rule("attempt-parked", "the supervisor held or failed the run: say so", _attempt_parked),
    Rule("cycle-record-unreadable", "unknown which checkpoints count: HELD", _undecided),
    Rule("crash-loop", "too many cycles without a new checkpoint: HELD", _crash_loop),
    Rule("first-launch", "no attempt yet: launch attempt 1", _first),
    Rule("backoff", "the pause before the next attempt is not over: wait", _backoff),
    Rule("next-attempt", "the newest attempt is over: launch the next one (L4)", _next),
)
