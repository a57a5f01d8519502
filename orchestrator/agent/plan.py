"""attempts/N/plan.json as supervisor and agents read it: what an attempt starts, and how patient it is.

Whoever launches the attempt writes it; the two processes inside the allocation read nothing of the YAML, so they start
without its parser. Unknown fields are ignored (the launcher keeps more in it).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.decide.policy import Policy, policy_from_config
from orchestrator.state.copies import Copies
from orchestrator.state.records import SCHEMA_VERSION, Unreadable, parse
from orchestrator.state.retention import Retention
from orchestrator.words import plural


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPlan:
    """What an attempt needs to know. `torchrun` holds the placeholders that `fill` replaces.

    num_nodes counts training nodes, num_spares the hot spares beside them. `config` is relative to the run directory;
    relative paths in it mean `workdir`. `recovery`, `monitoring` and `checkpoints` are its sections as plain values.
    """

    schema_version: int = SCHEMA_VERSION
    run: str
    attempt: int
    nonce: str
    launcher: str
    num_nodes: int
    num_spares: int = 0
    ranks_per_node: int
    world_size: int
    workdir: str | None = None
    config: str = "run.yaml"
    env: dict[str, str] = field(default_factory=dict)
    torchrun: tuple[str, ...] = ()
    recovery: dict[str, Any] = field(default_factory=dict)
    monitoring: dict[str, Any] = field(default_factory=dict)
    checkpoints: dict[str, Any] = field(default_factory=dict)

    @property
    def policy(self) -> Policy:
        """The thresholds. Raises ValueError or TypeError naming what does not fit."""
        return policy_from_config(self.recovery)

    @property
    def retention(self) -> Retention:
        """Which checkpoints stay. Raises ValueError or TypeError naming what does not fit."""
        known = ("keep_last", "keep_every")
        return Retention(**{key: self.checkpoints[key] for key in known if self.checkpoints.get(key) is not None})

    @property
    def copies(self) -> Copies:
        """What is copied and exported. Raises ValueError or TypeError naming what does not fit."""
        return Copies(**{key: self.checkpoints.get(key) for key in ("upload_to", "export_interval")})

    @property
    def supervisor_lost_s(self) -> float:
        """After how long without its supervisor an agent stops its ranks."""
        return float(self.recovery.get("supervisor_lost_s", 30.0))

    @property
    def agent_port(self) -> int:
        """The port of an agent's /metrics; 0 takes a free one."""
        return int(self.monitoring.get("agent_port") or 0)


def parse_plan(text: str | None) -> AttemptPlan | Unreadable:
    """The plan of an attempt, or why it cannot be used."""
    plan = parse(AttemptPlan, text)
    if isinstance(plan, Unreadable):
        return plan
    if plan.num_nodes * plan.ranks_per_node != plan.world_size:
        return Unreadable(
            why=f"{plural(plan.num_nodes, 'node')} × {plural(plan.ranks_per_node, 'rank')} per node is not the world "
            f"size {plan.world_size}"
        )
    try:
        plan.policy, plan.retention, plan.copies, plan.supervisor_lost_s, plan.agent_port  # noqa: B018 - each raises on what does not fit
    except (ValueError, TypeError, AttributeError) as error:
        return Unreadable(why=f"recovery, monitoring or checkpoints: {error}")
    return plan


def poll_s(policy: Policy) -> float:
    """How often an agent looks at its ranks: several times a beat."""
    return min(0.2, policy.beat_interval_s / 5)


def stopped_grace_s(policy: Policy) -> float:
    """A rank in state T for this long is stopped for good (a debugger's touch is shorter)."""
    return max(1.0, 2 * policy.beat_interval_s)


def fill(argv: tuple[str, ...], values: Mapping[str, str]) -> tuple[str, ...]:
    """The command with `{name}` replaced for each name in `values`; all other braces stay as they are."""
    filled = []
    for argument in argv:
        for name, value in values.items():
            argument = argument.replace(f"{{{name}}}", value)
        filled.append(argument)
    return tuple(filled)
