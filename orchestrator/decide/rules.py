"""A rule: a name, one line about it, and a pure function from what is known to a decision, or None: "not my case".

Rules stand in a tuple, the first that answers wins. The name of the winner is the name of the decision: in the ledger,
in a log line, as a metric's label and as the file name of a runbook.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from orchestrator.decide.decision import Decision

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Rule(Generic[C]):
    """`test` returns a decision whose `rule` may be empty; it gets this rule's name."""

    name: str
    about: str
    test: Callable[[C], Decision | None]


def first_match(rules: tuple[Rule[C], ...], context: C) -> Decision:
    """The decision of the first rule that answers. Raises LookupError when none does: the last rule must be total."""
    for rule in rules:
        decision = rule.test(context)
        if decision is not None:
            return replace(decision, rule=rule.name)
    raise LookupError(f"no rule of {[rule.name for rule in rules]} answered; the last one must answer always")


def table(title: str, rules: tuple[Rule[C], ...]) -> str:
    """The rules in order with their one line each, for people and for the golden file."""
    width = max(len(rule.name) for rule in rules)
    lines = [f"{number:2d}  {rule.name:<{width}}  {rule.about}" for number, rule in enumerate(rules, start=1)]
    return "\n".join([title, *lines, ""])
