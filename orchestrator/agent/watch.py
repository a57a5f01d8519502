"""Is a rank making progress? Pure: every call gets the time.

Progress means that the phase or the step counter moved; beats alone prove nothing. What a phase may last is learned
from how long it lasted here, between a floor and a ceiling: a 20-minute save is legal where saves last that long, and a
save that hangs past its own limit is still caught (H1). Beats of another epoch are another run's beats and do not count
(H3); before a rank's first beat the limit of INIT runs from the start of the cycle.
"""

from collections import deque
from dataclasses import dataclass, field

from orchestrator.agent.messages import Verdict
from orchestrator.agent.plan import stopped_grace_s
from orchestrator.agent.shm import Beat, Phase
from orchestrator.decide.observation import VerdictKind
from orchestrator.decide.policy import Policy

_REMEMBERED = 200
# A phase that happens once in a cycle must not wait for many samples to have a limit of its own.
_ENOUGH = {"step": 5, "data": 20}
# torchrun ends the siblings of a dead worker within a tenth of a second; its summary tells the first from the others.
EXIT_SETTLE_S = 1.5
GONE = "gone"
_TRAINING = (Phase.STEP, Phase.EVAL, Phase.SAVE, Phase.DATA)


class Durations:
    """How long each phase lasted on this node, newest 200. Lives as long as the agent, over all cycles."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[float]] = {}

    def add(self, phase: str, seconds: float) -> None:
        """Note that the phase was left after this long."""
        self._seen.setdefault(phase, deque(maxlen=_REMEMBERED)).append(seconds)

    def p99_s(self, phase: str) -> float | None:
        """The 99th percentile, None while too few were seen."""
        seen = sorted(self._seen.get(phase, ()))
        return None if len(seen) < _ENOUGH.get(phase, 1) else seen[min(len(seen) - 1, int(0.99 * len(seen)))]

    def all_p99_s(self) -> dict[str, float]:
        """Every phase that has one."""
        return {phase: p99 for phase in self._seen if (p99 := self.p99_s(phase)) is not None}


@dataclass(slots=True, kw_only=True)
class RankWatch:
    """One rank over one cycle. `moved_at` is when phase or step last changed, on the agent's monotonic clock."""

    rank: int
    moved_at: float
    beat: Beat | None = None
    state: str | None = None
    seen_alive: bool = False
    stopped_since: float | None = None
    gone_since: float | None = None
    judged: set[VerdictKind] = field(default_factory=set)
    has_stepped: bool = False

    @property
    def phase(self) -> str:
        """The lower-case name of the phase; INIT before the first beat."""
        return (self.beat.phase if self.beat is not None else Phase.INIT).name.lower()

    @property
    def step(self) -> int | None:
        """Completed steps, None before the first beat."""
        return None if self.beat is None else self.beat.step

    def observe(self, now: float, *, beat: Beat | None, state: str | None, durations: Durations) -> None:
        """Take in what was read: a beat of this epoch or None, and the kernel's state, "gone", or None (unknown)."""
        if beat is not None:
            before = None if self.beat is None else (self.beat.phase, self.beat.step)
            # The counter jumps once when a checkpoint is restored: only a step seen to follow another is a step.
            self.has_stepped |= before is not None and before[0] in _TRAINING and 0 < before[1] + 1 <= beat.step
            if before != (beat.phase, beat.step):
                if before is not None or beat.phase != Phase.INIT:
                    durations.add(self.phase, now - self.moved_at)
                self.moved_at = now
            self.beat = beat
        self.state = state
        self.seen_alive = self.seen_alive or state not in (None, GONE)
        self.stopped_since = (self.stopped_since or now) if state == "T" else None
        self.gone_since = (self.gone_since or now) if state == GONE and self.seen_alive else None

    def gone_is_settled(self, now: float) -> bool:
        """Whether this rank has been gone for so long that its torchrun will not explain it any more."""
        return self.gone_since is not None and now - self.gone_since >= EXIT_SETTLE_S

    def forgive(self, seconds: float) -> None:
        """The agent itself was held up for this long: the rank may have moved unseen, so its silence starts later."""
        self.moved_at += seconds
        if self.stopped_since is not None:
            self.stopped_since += seconds


def judge(watch: RankWatch, now: float, *, policy: Policy, durations: Durations) -> Verdict | None:
    """What is wrong with this rank, the surest sign first, each sign once per cycle; None when nothing is."""
    quiet = now - watch.moved_at
    limit = policy.limit_s(watch.phase, durations.p99_s(watch.phase))
    grace = stopped_grace_s(policy)
    stopped = 0.0 if watch.stopped_since is None else now - watch.stopped_since
    gone = 0.0 if watch.gone_since is None else now - watch.gone_since
    found: tuple[VerdictKind, float | None, str, float] | None = None
    if watch.phase != "exit" and watch.gone_is_settled(now):
        found = (VerdictKind.EXITED, None, "is gone", gone)
    elif watch.stopped_since is not None and stopped >= grace:
        found = (VerdictKind.STOPPED, grace, f"is stopped (state T) for {stopped:.1f} s", stopped)
    elif quiet > limit:
        found = (VerdictKind.PHASE_LIMIT, limit, f"stands still for {quiet:.1f} s (limit {limit:.1f} s)", quiet)
    if found is None or found[0] in watch.judged:
        return None
    kind, limit_s, what, ago_s = found
    watch.judged.add(kind)
    return Verdict(
        kind=kind,
        rank=watch.rank,
        phase=watch.phase,
        step=watch.step,
        quiet_s=quiet,
        limit_s=limit_s,
        message=f"rank {watch.rank} {what} in {watch.phase}",
        ago_s=ago_s,
    )
