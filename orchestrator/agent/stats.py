"""What the ranks of this node have done, over all cycles of this agent.

A rank's counters cover the life of its process. Prometheus and the supervisor want counters that only grow, so the
agent adds up the processes: the last statistics of each finished cycle plus those of the running one. Gauges (loss,
learning rate, memory …) are those of the newest process; a number that is not finite is unknown and becomes None.
"""

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from orchestrator.agent import shm
from orchestrator.agent.cycle import NodeCycle
from orchestrator.agent.messages import RankReport
from orchestrator.agent.plan import stopped_grace_s
from orchestrator.agent.watch import GONE, RankWatch
from orchestrator.decide.policy import Policy
from orchestrator.state.epochs import Epoch

COUNTERS = (
    *("steps_total", "tokens_total", "samples_total", "model_flops_total", "step_seconds_sum"),
    *("data_wait_seconds_total", "nonfinite_steps_total", "skipped_steps_total", "checkpoint_saves_total"),
    *("checkpoint_blocking_seconds_sum", "validation_passes_total", "validation_seconds_total"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBlock:
    """One rank for the exporter: its newest beat and its statistics over all cycles (None while unreadable)."""

    rank: int
    beat: shm.Beat | None
    stats: shm.Stats | None


def add_stats(earlier: shm.Stats, now: shm.Stats) -> shm.Stats:
    """Counters and buckets added, everything else as it is now."""
    sums = {name: getattr(earlier, name) + getattr(now, name) for name in COUNTERS}
    buckets = tuple(a + b for a, b in zip(earlier.step_buckets, now.step_buckets, strict=True))
    return replace(now, **sums, step_buckets=buckets)


class StatsKeeper:
    """Adds the processes up. Read by the exporter's thread, written by the agent's loop, hence the lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed: dict[int, shm.Stats] = {}
        self._running: dict[int, shm.Stats] = {}
        self._beats: dict[int, shm.Beat] = {}

    def look(self, memory: shm.NodeMemory, epoch: Epoch) -> None:
        """Take in what the ranks of this epoch have published."""
        for local in range(memory.num_ranks):
            beat, stats = memory.read_beat(local), memory.read_stats(local)
            if isinstance(beat, shm.Beat) and beat.epoch == epoch:
                with self._lock:
                    self._beats[beat.rank] = beat
                    if isinstance(stats, shm.Stats):
                        self._running[beat.rank] = stats

    def close(self) -> None:
        """The cycle is over: its counters become part of the past."""
        with self._lock:
            for rank, stats in self._running.items():
                earlier = self._closed.get(rank)
                self._closed[rank] = stats if earlier is None else add_stats(earlier, stats)
            self._running.clear()
            self._beats.clear()

    def total(self, rank: int) -> shm.Stats | None:
        """The statistics of a rank over all cycles, None before it published any."""
        with self._lock:
            closed, running = self._closed.get(rank), self._running.get(rank)
        if closed is None or running is None:
            return running or closed
        return add_stats(closed, running)

    def blocks(self) -> tuple[RankBlock, ...]:
        """All ranks this node has had, by rank; those of the running cycle have a beat."""
        with self._lock:
            ranks, beats = sorted({*self._closed, *self._running}), dict(self._beats)
        return tuple(RankBlock(rank=rank, beat=beats.get(rank), stats=self.total(rank)) for rank in ranks)


def stats_json(stats: shm.Stats | None) -> dict[str, object]:
    """Statistics as JSON: None for what is not finite, buckets as a list; {} while there are none."""
    if stats is None:
        return {}
    values = {field.name: getattr(stats, field.name) for field in fields(stats) if field.name != "seq"}
    values["step_buckets"] = list(stats.step_buckets)
    return {name: finite(value) if isinstance(value, float) else value for name, value in values.items()}


def finite(value: float | None) -> float | None:
    """The number, None when it is NaN or infinite."""
    return value if value is not None and math.isfinite(value) else None


def rank_reports(cycle: NodeCycle, stats: StatsKeeper, policy: Policy, now: float) -> tuple[RankReport, ...]:
    """What to tell the supervisor about each rank."""
    return tuple(_report(watch, stats_json(stats.total(watch.rank)), policy, now) for watch in cycle.watches)


def _report(watch: RankWatch, stats: Mapping[str, object], policy: Policy, now: float) -> RankReport:
    beat = watch.beat
    return RankReport(
        rank=watch.rank,
        pid=None if beat is None else beat.pid,
        state=told_state(watch, policy, now),
        phase=None if beat is None else watch.phase,
        step=watch.step,
        quiet_s=now - watch.moved_at,
        collective_seq=None if beat is None else beat.collective_seq,
        control_ack=0 if beat is None else beat.control_ack,
        profile_ack=0 if beat is None else beat.profile_ack,
        loss=None if beat is None else finite(beat.loss),
        tokens=0 if beat is None else beat.tokens,
        stats=dict(stats),
    )


def told_state(watch: RankWatch, policy: Policy, now: float) -> str | None:
    """The kernel's state as the supervisor may judge it.

    A stop shorter than the grace is told as sleep. A rank that ends in its EXIT phase is leaving, not lost, and one
    that is gone is told when it is settled who went first: torchrun says how it went.
    """
    if watch.state == "T":
        return "T" if watch.stopped_since is not None and now - watch.stopped_since >= stopped_grace_s(policy) else "S"
    if watch.state == GONE and (watch.phase == "exit" or not watch.gone_is_settled(now)):
        return None
    return watch.state
