"""The thresholds of recovery, as data: one Policy is all that assess and decide know of the configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.decide.taxonomy import TABLE, FailureClass

PHASES = ("init", "compile", "restore", "step", "eval", "save", "data", "exit")


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseLimit:
    """How long a phase may last without moving: p99 · factor, never under the floor, never over the ceiling (s).

    While no p99 is known the ceiling holds: a slow first step must not look like a hang.
    """

    floor_s: float
    factor: float
    ceiling_s: float

    def limit_s(self, p99_s: float | None) -> float:
        """The limit in seconds."""
        return self.ceiling_s if p99_s is None else min(max(p99_s * self.factor, self.floor_s), self.ceiling_s)


DEFAULT_LIMITS: dict[str, PhaseLimit] = {
    "init": PhaseLimit(floor_s=120.0, factor=3.0, ceiling_s=900.0),
    "compile": PhaseLimit(floor_s=300.0, factor=3.0, ceiling_s=3600.0),
    "restore": PhaseLimit(floor_s=120.0, factor=3.0, ceiling_s=3600.0),
    "step": PhaseLimit(floor_s=10.0, factor=3.0, ceiling_s=600.0),
    "eval": PhaseLimit(floor_s=120.0, factor=3.0, ceiling_s=3600.0),
    # Most saves only take a snapshot, so what was learned says nothing of those that training waits for.
    "save": PhaseLimit(floor_s=600.0, factor=3.0, ceiling_s=3600.0),
    "data": PhaseLimit(floor_s=60.0, factor=5.0, ceiling_s=1800.0),
    "exit": PhaseLimit(floor_s=60.0, factor=3.0, ceiling_s=600.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Everything configurable about health and decisions. Seconds, counts, shares (0–1)."""

    beat_interval_s: float = 5.0
    silence_intervals: int = 3
    phase_limits: dict[str, PhaseLimit] = field(default_factory=lambda: dict(DEFAULT_LIMITS))
    backoff_s: tuple[float, ...] = (0.0, 30.0, 120.0, 480.0, 1800.0)
    max_cycles_without_checkpoint: int = 5
    tries_per_level: int = 2
    budgets: dict[FailureClass, int] = field(default_factory=dict)
    commits_that_reset_backoff: int = 2
    correlated_nodes: int = 3
    correlated_share: float = 0.2
    correlated_limit_s: float = 900.0
    late_intervals: float = 2.0
    settle_s: float = 2.0
    start_limit_s: float = 300.0
    launch_clear_s: float = 60.0
    exclude_ttl_s: float = 86400.0

    @property
    def silence_limit_s(self) -> float:
        """Silence after which an agent is taken for dead."""
        return self.beat_interval_s * self.silence_intervals

    @property
    def spare_wait_s(self) -> float:
        """How long a hot spare stays out while a node that should train may still come."""
        return self.start_limit_s / 5

    def budget(self, failure: FailureClass) -> int | None:
        """Restarts allowed without progress; None is unlimited."""
        return self.budgets.get(failure, TABLE[failure].budget)

    def limit_s(self, phase: str, p99_s: float | None = None) -> float:
        """The limit of a phase in seconds; an unknown phase has that of `step`."""
        limits = self.phase_limits
        return limits.get(phase, limits.get("step", DEFAULT_LIMITS["step"])).limit_s(p99_s)


def policy_from_config(recovery: Mapping[str, Any]) -> Policy:
    """The Policy of a validated `recovery` section (plain values, as `model_dump()` gives them).

    Keys that are absent or None keep their default. Raises ValueError for a class in `budgets` that does not exist.
    """
    known = ("beat_interval_s", "silence_intervals", "max_cycles_without_checkpoint", "start_limit_s", "exclude_ttl_s")
    values: dict[str, Any] = {key: recovery[key] for key in known if recovery.get(key) is not None}
    if recovery.get("backoff_s") is not None:
        values["backoff_s"] = tuple(float(seconds) for seconds in recovery["backoff_s"])
    if recovery.get("budgets"):
        values["budgets"] = {FailureClass(name): int(count) for name, count in recovery["budgets"].items()}
    return Policy(**values, phase_limits=_limits(recovery.get("phase_limits") or {}))


def _limits(configured: Mapping[str, Any]) -> dict[str, PhaseLimit]:
    limits = dict(DEFAULT_LIMITS)
    for phase, given in configured.items():
        base = limits.get(phase)
        if base is None or given is None:
            continue
        limits[phase] = PhaseLimit(
            floor_s=_or(given.get("floor_s"), base.floor_s),
            factor=_or(given.get("factor"), base.factor),
            ceiling_s=_or(given.get("ceiling_s"), base.ceiling_s),
        )
    return limits


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)
