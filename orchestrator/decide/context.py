"""What a rule of the supervisor may know, and the two ways in which it says what it found."""

from dataclasses import dataclass

from orchestrator.decide.budgets import Remedy, remedy
from orchestrator.decide.decision import Action, Decision, Fault
from orchestrator.decide.health import Health
from orchestrator.decide.observation import CycleObservation
from orchestrator.decide.placement import choose_nodes
from orchestrator.decide.policy import Policy
from orchestrator.state.history import History
from orchestrator.state.records import Verb


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleContext:
    """One look and everything derived from it. `remedy` is what the budgets allow for `fault`; None without one."""

    seen: CycleObservation
    history: History
    policy: Policy
    health: Health
    fault: Fault | None
    remedy: Remedy | None

    def asked(self, verb: Verb) -> bool:
        return any(request.verb is verb for request in self.seen.requests)

    @property
    def leaving(self) -> bool:
        """Someone wants this allocation to end after a checkpoint."""
        return self.asked(Verb.DRAIN) or self.seen.notice is not None

    @property
    def parting_outcome(self) -> str:
        """A person's drain parks the run; a time limit or preemption continues in the next attempt."""
        return "drained" if self.asked(Verb.DRAIN) else "continue"

    @property
    def resume_from(self) -> str | None:
        newest = self.seen.counting.newest
        return None if newest is None else newest.name


def context_of(
    seen: CycleObservation, history: History, policy: Policy, health: Health, fault: Fault | None
) -> CycleContext:
    """Add what the budgets allow."""
    allowed = None
    if fault is not None:
        leave = tuple(dict.fromkeys((*fault.must_leave, *((fault.node,) if fault.node else ()))))
        allowed = remedy(fault, history, policy, can_swap=choose_nodes(seen, health, leave=leave) is not None)
    return CycleContext(seen=seen, history=history, policy=policy, health=health, fault=fault, remedy=allowed)


def decided(action: Action, reason: str, **more: object) -> Decision:
    """A decision whose rule is told by whoever asked."""
    return Decision(rule="", action=action, reason=reason, **more)  # type: ignore[arg-type]


def clause(fault: Fault) -> str:
    """What happened, as the first half of a sentence: a rank's message may be a paragraph with its own full stop."""
    return fault.message.rstrip().rstrip(".")
