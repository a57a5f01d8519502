"""Acting on a controller's decision: the only writer to the world outside an allocation.

    launch    mkdir attempts/N (the lock) → intent.json → ledger → Launcher.launch → ledger
    abandon   claim an attempt that never began, so that it never will
    end       record that an attempt is over without a word
    finish · hold · fail   the run's last word, and the answer to whoever asked for it

A crash between any two of these leaves a state from which the next look decides the same. Two controllers are harmless:
launching is locked by the directory, and every other word is dropped when the ledger grew since the look it rests on.
"""

import os
import secrets
from dataclasses import dataclass
from typing import Protocol

from orchestrator.agent import proc
from orchestrator.control.clock import Clock
from orchestrator.control.observe import RunLook, newest_attempt
from orchestrator.decide.decision import Action, Decision
from orchestrator.decide.observation import Liveness
from orchestrator.errors import PawlError, UsageError
from orchestrator.state.codec import dumps
from orchestrator.state.epochs import Epoch
from orchestrator.state.fsio import claim, write_atomic
from orchestrator.state.ledger import Ledger, latest_epoch, read_all
from orchestrator.state.records import Claim, Intent, Verb
from orchestrator.state.requests import acknowledge
from orchestrator.state.rundir import RunPaths, make_attempt

_PARKED_HINT = "`pawl explain RUN` shows the evidence, `pawl resume RUN` goes on"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """What a launcher knows after launching: Slurm's job id, or the supervisor's pid on this machine."""

    job_id: str | None = None
    pid: int | None = None


class Launcher(Protocol):
    """Starts the supervisor of an attempt: sbatch, or a process on this machine. `kind` is "slurm" or "local".

    `liveness` says whether anything of an attempt may still run (`observe.local_liveness` for this machine). `launch`
    raises UsageError when the run cannot be launched as it is configured, PawlError when it cannot be launched now.
    """

    @property
    def kind(self) -> str: ...

    def liveness(self, intent: Intent | None, claim: Claim | None) -> tuple[Liveness, str]: ...

    def launch(self, *, paths: RunPaths, attempt: int, nonce: str, exclude: tuple[str, ...]) -> Launched: ...


def controller_writer() -> str:
    """The ledger name of this process: ctl-host-pid-start."""
    return f"ctl-{os.uname().nodename}-{os.getpid()}-{proc.own_start_ticks()}"


def act(decision: Decision, look: RunLook, *, paths: RunPaths, launcher: Launcher, clock: Clock, by: str) -> str:
    """Carry out a decision; returns one sentence about what was done. Raises PawlError from the launcher, OSError."""
    if decision.action is Action.WAIT:
        return decision.reason
    ledger = Ledger(paths.root, controller_writer(), clock=clock)
    if len(read_all(paths.root)) != look.num_events:
        return "the run moved on while it was looked at; nothing done, look again"
    match decision.action:
        case Action.LAUNCH:
            return _launch(decision, ledger, paths=paths, launcher=launcher, clock=clock, by=by)
        case Action.ABANDON:
            return _abandon(decision, ledger, paths=paths, clock=clock)
        case Action.END:
            return _end(decision, ledger, look)
        case Action.FINISH:
            return _finish(decision, ledger, look, paths)
        case Action.HOLD | Action.FAIL:
            return _park(decision, ledger, look, paths)
        case _:
            raise PawlError(
                f"decision {decision.rule} asks for {decision.action}, which only a supervisor inside an attempt can do"
            )


def _launch(decision: Decision, ledger: Ledger, *, paths: RunPaths, launcher: Launcher, clock: Clock, by: str) -> str:
    attempt = decision.attempt
    newest = newest_attempt(paths)
    if attempt is None or newest is None or newest != attempt - 1 or not make_attempt(paths, attempt):
        return "someone else has taken this attempt"
    epoch, nonce = Epoch(attempt, 0, 0), secrets.token_hex(16)
    intent = Intent(
        attempt=attempt,
        nonce=nonce,
        launcher=launcher.kind,
        by=by,
        created_unix=clock.now_unix(),
        exclude=decision.exclude,
    )
    write_atomic(paths.intent(attempt), dumps(intent, indent=2) + "\n")
    ledger.append(epoch, "decision", decision.ledger_data())
    ledger.append(
        epoch,
        "attempt_intent",
        {"attempt": attempt, "nonce": nonce, "launcher": launcher.kind, "exclude": list(decision.exclude)},
    )
    try:
        launched = launcher.launch(paths=paths, attempt=attempt, nonce=nonce, exclude=decision.exclude)
    except PawlError as error:
        _give_up(paths, ledger, attempt=attempt, clock=clock, error=error)
        raise
    ledger.append(epoch, "attempt_submitted", {"attempt": attempt, "job_id": launched.job_id, "pid": launched.pid})
    return f"launched attempt {attempt}"


def _give_up(paths: RunPaths, ledger: Ledger, *, attempt: int, clock: Clock, error: PawlError) -> None:
    """The launch was refused: close the attempt, so that whatever may have been started of it ends at its claim."""
    if not _take(paths, attempt, clock=clock):
        return
    outcome = "failed" if isinstance(error, UsageError) else "lost"
    data = {"attempt": attempt, "outcome": outcome, "reason": str(error), "rule": "launch-refused"}
    ledger.append(Epoch(attempt, 0, 0), "attempt_ended", data)


def _take(paths: RunPaths, attempt: int, *, clock: Clock) -> bool:
    """Claim an attempt with a nonce that is not its own: nobody runs it then. False when it has begun after all."""
    record = Claim(
        nonce=f"abandoned-{secrets.token_hex(8)}",
        host=os.uname().nodename,
        pid=os.getpid(),
        start_ticks=proc.own_start_ticks(),
        boot_id=proc.boot_id(),
        created_unix=clock.now_unix(),
    )
    return claim(paths.claim(attempt), dumps(record) + "\n")


def _abandon(decision: Decision, ledger: Ledger, *, paths: RunPaths, clock: Clock) -> str:
    attempt = decision.attempt
    if attempt is None or not _take(paths, attempt, clock=clock):
        return f"attempt {attempt} has begun after all"
    epoch = Epoch(attempt, 0, 0)
    if not paths.intent(attempt).exists():
        # Whoever made the folder died before the intent; with one, the attempt reads as abandoned for ever.
        intent = Intent(attempt=attempt, nonce="never", launcher="unknown", by="", created_unix=clock.now_unix())
        write_atomic(paths.intent(attempt), dumps(intent) + "\n")
    ledger.append(epoch, "decision", decision.ledger_data())
    ledger.append(epoch, "attempt_ended", _ended(decision))
    return f"attempt {attempt} never began and is closed"


def _ended(decision: Decision) -> dict[str, object]:
    return {
        "attempt": decision.attempt,
        "outcome": decision.outcome,
        "reason": decision.reason,
        "rule": decision.rule,
    }


def _end(decision: Decision, ledger: Ledger, look: RunLook) -> str:
    epoch = max(look.history.last_epoch, Epoch(decision.attempt or 0, 0, 0))
    ledger.append(epoch, "decision", decision.ledger_data())
    ledger.append(epoch, "attempt_ended", _ended(decision))
    return decision.reason


def _finish(decision: Decision, ledger: Ledger, look: RunLook, paths: RunPaths) -> str:
    newest = look.seen.counting.newest
    epoch = latest_epoch(read_all(paths.root))
    ledger.append(epoch, "decision", decision.ledger_data())
    ledger.append(epoch, "run_done", {"step": look.history.best_step if newest is None else newest.step})
    for request in look.seen.requests:
        acknowledge(paths, ledger, epoch, request, result="the run is complete")
    return decision.reason


def _park(decision: Decision, ledger: Ledger, look: RunLook, paths: RunPaths) -> str:
    kind = "run_failed" if decision.action is Action.FAIL else "run_held"
    epoch = latest_epoch(read_all(paths.root))
    ledger.append(epoch, "decision", decision.ledger_data())
    hint = decision.hint or _PARKED_HINT
    ledger.append(epoch, kind, {"rule": decision.rule, "reason": decision.reason, "hint": hint})
    for request in look.seen.requests:
        if request.verb not in (Verb.SAVE_NOW, Verb.PROFILE):
            acknowledge(paths, ledger, epoch, request, result="done")
    return decision.reason
