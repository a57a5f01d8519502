"""The controller: look, decide, act, say when to look again. Level-triggered; it keeps no state between two looks.

First launch and hundredth relaunch are the same call. Killed at any instant and started anywhere the run directory is
visible, it goes on from what the run directory says.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from orchestrator.control.act import Launcher, act
from orchestrator.control.clock import Clock
from orchestrator.control.observe import observe_run
from orchestrator.decide.decide import decide_run
from orchestrator.decide.decision import Action, Decision
from orchestrator.decide.policy import Policy
from orchestrator.errors import PawlError
from orchestrator.state.rundir import RunPaths, check_owner

_MAX_ROUNDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciled:
    """What came of one run: the decision and what was done; `error` when it could not be carried out."""

    paths: RunPaths
    decision: Decision | None
    done: str
    error: PawlError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Handling:
    """How a run is launched, and its thresholds: what the controller must know besides the run directory."""

    launcher: Launcher
    policy: Policy


def reconcile_once(
    paths: RunPaths, *, launcher: Launcher, policy: Policy, clock: Clock, by: str, observe_only: bool = False
) -> Reconciled:
    """One look and its consequence. `observe_only` decides and changes nothing. Raises PawlError and OSError."""
    check_owner(paths)
    look = observe_run(paths, launcher=launcher, clock=clock, commits_that_reset=policy.commits_that_reset_backoff)
    decision = decide_run(look.seen, look.history, policy)
    if observe_only:
        return Reconciled(paths=paths, decision=decision, done=f"would {decision.action}: {decision.reason}")
    done = act(decision, look, paths=paths, launcher=launcher, clock=clock, by=by)
    return Reconciled(paths=paths, decision=decision, done=done)


def reconcile(paths: RunPaths, *, launcher: Launcher, policy: Policy, clock: Clock, by: str) -> Reconciled:
    """Look again while there is more to do at once: recording a lost attempt and launching the next are two looks."""
    result = reconcile_once(paths, launcher=launcher, policy=policy, clock=clock, by=by)
    for _ in range(_MAX_ROUNDS):
        if result.decision is None or result.decision.action not in (Action.END, Action.ABANDON):
            break
        result = reconcile_once(paths, launcher=launcher, policy=policy, clock=clock, by=by)
    return result


def reconcile_many(
    runs: Iterable[RunPaths],
    handling: Callable[[RunPaths], Handling],
    *,
    clock: Clock,
    by: str,
    observe_only: bool = False,
) -> tuple[Reconciled, ...]:
    """Every run once; one run's trouble is reported and stops no other. `handling` may raise PawlError as well."""
    results = []
    for paths in runs:
        try:
            how = handling(paths)
            results.append(
                reconcile_once(
                    paths, launcher=how.launcher, policy=how.policy, clock=clock, by=by, observe_only=observe_only
                )
            )
        except PawlError as error:
            results.append(Reconciled(paths=paths, decision=None, done=str(error), error=error))
        except OSError as error:
            trouble = PawlError(f"{paths.root}: {error.strerror or error}. The other runs are not affected.")
            results.append(Reconciled(paths=paths, decision=None, done=str(trouble), error=trouble))
    return tuple(results)


def recheck_after_s(results: Iterable[Reconciled], *, floor_s: float = 1.0, ceiling_s: float = 60.0) -> float:
    """When to look again: the soonest wish of any run, between floor and ceiling (s)."""
    wishes = [result.decision.recheck_after_s for result in results if result.decision is not None]
    return min(ceiling_s, max(floor_s, min(wishes, default=ceiling_s)))


def watch(
    runs: Callable[[], Iterable[RunPaths]],
    handling: Callable[[RunPaths], Handling],
    *,
    clock: Clock,
    by: str,
    report: Callable[[tuple[Reconciled, ...]], None],
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Reconcile for ever; `runs` is asked anew in every round, `report` gets every round, `stop` ends it."""
    while not stop():
        results = reconcile_many(runs(), handling, clock=clock, by=by)
        report(results)
        clock.sleep(recheck_after_s(results))
