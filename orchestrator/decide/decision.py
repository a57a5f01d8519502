"""A decision: what to do, which rule said so, and why. Data; whoever acts on it adds nothing of its own.

    supervisor   wait · note · start · restart · drain · save · profile · fetch · finish · end · hold · fail · cancel
    controller   wait · launch · abandon · end · finish · hold · fail

`restart` is one act: collect evidence, stop what runs, set the bad checkpoint aside, wait `backoff_s`, start the next
cycle on `nodes` from `resume_from`. (A commit may land while ranks are stopped: whoever acts may look again at stage
idle after the stop, and then start what that `start` decision says.) `end` stops everything and ends the attempt with
`outcome`; the controller goes on from there. For a controller `end` records that an attempt is over. `note` only
records, and excludes nodes that do not train.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from orchestrator.decide.taxonomy import FailureClass, Level


class Action(StrEnum):
    """What a decision asks for."""

    WAIT = "wait"
    NOTE = "note"
    START = "start"
    RESTART = "restart"
    DRAIN = "drain"
    SAVE = "save"
    PROFILE = "profile"
    FETCH = "fetch"
    FINISH = "finish"
    END = "end"
    HOLD = "hold"
    FAIL = "fail"
    CANCEL = "cancel"
    LAUNCH = "launch"
    ABANDON = "abandon"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Why a cycle cannot go on. `fingerprint` = class | signature | entity: the same fault twice has the same one.

    `must_leave`: the named node cannot train any more, so a restart on the same nodes is impossible.
    `cascade_only`: only echoes of the fault are known yet (a peer closed the connection …), not its cause.
    """

    cls: FailureClass
    message: str
    fingerprint: str
    node: str | None = None
    rank: int | None = None
    phase: str | None = None
    step: int | None = None
    evidence: tuple[str, ...] = ()
    fault_unix: float | None = None
    detected_unix: float | None = None
    must_leave: tuple[str, ...] = ()
    cascade_only: bool = False
    bad_checkpoint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One decision. `rule` is also the ledger entry's name, the metric label and the runbook's file name.

    `nodes`: who trains in the next cycle, in node-rank order. `exclude`: who must not, from now on.
    `outcome`: how the attempt ends (`end`, `finish`, `hold`, `fail`, `cancel`). `quarantine`: checkpoint to set aside.
    `attempt`: the number to launch or abandon.
    """

    rule: str
    action: Action
    reason: str
    level: Level | None = None
    recheck_after_s: float = 1.0
    exclude: tuple[str, ...] = ()
    resume_from: str | None = None
    backoff_s: float = 0.0
    nodes: tuple[str, ...] = ()
    fault: Fault | None = None
    quarantine: str | None = None
    outcome: str | None = None
    attempt: int | None = None
    hint: str = ""

    def ledger_data(self) -> dict[str, Any]:
        """The data of a `decision` event."""
        return {
            "rule": self.rule,
            "action": str(self.action),
            "level": None if self.level is None else str(self.level),
            "reason": self.reason,
            "backoff_s": self.backoff_s,
            "exclude": list(self.exclude),
            "resume_from": self.resume_from,
        }


def incident_data(decision: Decision, *, incident_id: str) -> dict[str, Any]:
    """The data of the `incident` event of a decision with a fault. Raises ValueError when it has none."""
    fault = decision.fault
    if fault is None:
        raise ValueError(f"decision {decision.rule} carries no fault, so there is no incident to record")
    return {
        "id": incident_id,
        "class": str(fault.cls),
        "rule": decision.rule,
        "level": None if decision.level is None else str(decision.level),
        "node": fault.node,
        "rank": fault.rank,
        "phase": fault.phase,
        "step": fault.step,
        "fingerprint": fault.fingerprint,
        "message": fault.message,
        "evidence": list(fault.evidence),
        "fault_unix": fault.fault_unix,
        "detected_unix": fault.detected_unix,
    }
