"""How far recovery may go: the rung of the ladder, the pause before it, and where it ends. Pure.

Everything is counted since the last *progress* (a checkpoint newer than any before), so a run that is slow but moves is
never stopped, and one that only changes its symptoms is. In this order:

    no rung for this class                  → stop                                 (not-restartable)
    five cycles without progress            → stop, whatever the symptoms          (crash-loop)
    the class has used up its budget        → stop                                 (budget-exhausted)
    two tries of one fingerprint on a rung  → the next rung; none left → stop      (ladder-exhausted)

The pause grows with restarts in a row (0 s, 30 s, 2 min, 8 min, 30 min) and is reset by two new checkpoints.
"""

from dataclasses import dataclass

from orchestrator.decide.decision import Fault
from orchestrator.decide.policy import Policy
from orchestrator.decide.taxonomy import TABLE, Exclusion, FailureClass, Final, Level
from orchestrator.state.history import History
from orchestrator.words import plural


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """What the budgets allow for a fault. `level` L5 means stop: `final` says how the run stands then."""

    level: Level
    rule: str
    why: str
    final: Final | None = None
    backoff_s: float = 0.0
    exclude: tuple[str, ...] = ()


def remedy(fault: Fault, history: History, policy: Policy, *, can_swap: bool) -> Remedy:
    """The cheapest sufficient rung. `can_swap`: enough spares are ready for the nodes that would leave."""
    row = TABLE[fault.cls]
    earlier = [incident for incident in history.unresolved if incident.cls == fault.cls]
    same = [incident for incident in earlier if incident.fingerprint == fault.fingerprint]
    if not row.ladder:
        return _stop("not-restartable", f"{fault.cls}: {row.evidence}", row.final)
    stopped = _ceiling(history, policy) or _spent(fault, len(earlier), history, policy)
    if stopped is not None:
        return stopped
    rung = _rung(fault, len(same), policy, can_swap=can_swap)
    if rung is None:
        why = f"{len(same)} restarts did not cure {fault.fingerprint}{_cause(history)}"
        return _stop("ladder-exhausted", why, row.final)
    return Remedy(
        level=rung,
        rule=_RUNG_RULES[rung],
        why=_rung_why(fault, rung, len(same)),
        backoff_s=backoff_s(history.streak, policy) if row.backoff else 0.0,
        exclude=_exclude(fault, rung, recurred=bool(same)),
    )


_RUNG_RULES = {
    Level.L1: "restart-same-nodes",
    Level.L2: "swap-node",
    Level.L3: "queued-successor",
    Level.L4: "new-attempt",
}


def backoff_s(streak: int, policy: Policy) -> float:
    """Seconds to wait before the next restart after `streak` restarts in a row."""
    pauses = policy.backoff_s or (0.0,)
    return pauses[min(streak, len(pauses) - 1)]


def crash_loop(history: History, policy: Policy) -> str | None:
    """Why the general ceiling stops the run, None while it does not."""
    count = history.cycles_without_progress
    if count < policy.max_cycles_without_checkpoint:
        return None
    return f"{plural(count, 'cycle')} in a row without a new checkpoint{_cause(history)}"


def _cause(history: History) -> str:
    """What began the present trouble: what a person should read first."""
    first = history.first_error
    return f"; the first failure was: {first.message}" if first is not None else ""


def _ceiling(history: History, policy: Policy) -> Remedy | None:
    why = crash_loop(history, policy)
    return None if why is None else _stop("crash-loop", why, Final.HELD)


def _spent(fault: Fault, used: int, history: History, policy: Policy) -> Remedy | None:
    budget = policy.budget(fault.cls)
    if fault.cls is FailureClass.START_FAIL and not history.ever_stepped and budget is not None:
        budget = min(budget, 1)  # a run that never trained is more likely wrong than unlucky
    if budget is not None and used >= budget:
        times = f"{used} restart{'' if used == 1 else 's'}"
        why = f"{fault.cls}: {times} without a new checkpoint{_cause(history)}"
        return _stop("budget-exhausted", why, TABLE[fault.cls].final)
    return None


def _stop(rule: str, why: str, final: Final) -> Remedy:
    return Remedy(level=Level.L5, rule=rule, why=why, final=final)


def _rung(fault: Fault, same: int, policy: Policy, *, can_swap: bool) -> Level | None:
    """The rung after `same` earlier restarts of this fingerprint; rungs that cannot work here are passed over."""
    ladder = TABLE[fault.cls].ladder
    tries = [level for level in ladder for _ in range(policy.tries_per_level if level is Level.L1 else 1)]
    left = tries[same:]
    for level in left:
        if level is Level.L1 and not fault.must_leave:
            return level
        if level in (Level.L1, Level.L2) and can_swap and _leavers(fault):
            return Level.L2
        if level in (Level.L3, Level.L4):
            return level
    return Level.L4 if left and fault.must_leave else None


def _rung_why(fault: Fault, level: Level, same: int) -> str:
    times = "" if same == 0 else f", seen {same + 1} times without a new checkpoint"
    places = {
        Level.L1: "a new cycle on the same nodes",
        Level.L2: f"a spare takes the place of {', '.join(_leavers(fault)) or 'the node'}",
        Level.L3: "the queued successor goes on",
        Level.L4: "this allocation cannot go on, a new attempt can",
    }
    return f"{fault.cls}{times}: {places[level]}"


def _leavers(fault: Fault) -> tuple[str, ...]:
    named = () if fault.node is None else (fault.node,)
    return tuple(dict.fromkeys((*fault.must_leave, *named)))


def _exclude(fault: Fault, level: Level, *, recurred: bool) -> tuple[str, ...]:
    rule = TABLE[fault.cls].exclude
    leaves = rule is Exclusion.ALWAYS or (rule is Exclusion.RECURRENCE and recurred) or level is Level.L2
    return _leavers(fault) if leaves else fault.must_leave
