"""decide: what is seen and what has been → one Decision. Pure, total, in two scopes.

supervisor   decide_cycle(observation, history, policy)   inside an allocation: L1, L2, and when to leave it
controller   decide_run(observation, history, policy)     outside: L3–L5, the first launch included
"""

from orchestrator.decide.classify import classify
from orchestrator.decide.context import context_of
from orchestrator.decide.decision import Decision
from orchestrator.decide.health import Health, assess
from orchestrator.decide.observation import CycleObservation, RunObservation
from orchestrator.decide.policy import Policy
from orchestrator.decide.rules import first_match, table
from orchestrator.decide.rules_cycle import CYCLE_RULES
from orchestrator.decide.rules_run import RUN_RULES, RunContext
from orchestrator.state.history import History


def decide_cycle(seen: CycleObservation, history: History, policy: Policy, *, health: Health | None = None) -> Decision:
    """The supervisor's next act. `health` may be passed when it was assessed already."""
    health = health if health is not None else assess(seen, policy)
    fault = classify(seen, health, ever_stepped=history.ever_stepped or history.best_step > 0)
    return first_match(CYCLE_RULES, context_of(seen, history, policy, health, fault))


def decide_run(seen: RunObservation, history: History, policy: Policy) -> Decision:
    """The controller's next act."""
    return first_match(RUN_RULES, RunContext(seen=seen, history=history, policy=policy))


def decision_table() -> str:
    """Both scopes' rules in order, as people read them."""
    cycle = table("supervisor (decide_cycle): first match wins", CYCLE_RULES)
    run = table("controller (decide_run): first match wins", RUN_RULES)
    return f"{cycle}\n{run}"
