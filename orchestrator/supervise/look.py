"""The supervisor's eyes: agents' reports, the newest scan of the run directory, the ledger's history → one observation.

Something that ended is told to the decision only together with a scan that began after it: otherwise a rank that left
its reason in an outcome file would look like one that left none.
"""

import time
from collections.abc import Iterable

from orchestrator.agent.io import Worker
from orchestrator.agent.messages import Exited, Refused, Report
from orchestrator.agent.plan import AttemptPlan
from orchestrator.decide.decide import decide_cycle
from orchestrator.decide.decision import Decision
from orchestrator.decide.observation import CopyState, CycleObservation, NodeObservation, Stage, StopNotice
from orchestrator.state.counting import Counting, count
from orchestrator.state.epochs import Epoch
from orchestrator.state.history import History, replay, with_unrecorded_checkpoints
from orchestrator.state.presence import Presence, RunDirGone, Vanishing
from orchestrator.state.records import Event, LaunchFacts, Outcome, Request
from orchestrator.state.requests import open_requests
from orchestrator.state.rundir import RunPaths
from orchestrator.supervise.edge import Edge
from orchestrator.supervise.hub import Heard, Hub
from orchestrator.supervise.nodes import Nodes
from orchestrator.supervise.scan import Scan, scan

_NOTICES = {"SIGUSR2": StopNotice.TIME_LIMIT, "SIGTERM": StopNotice.PREEMPTED}
_SCAN_PATIENCE_S = 60.0


class Lookout:
    """What the supervisor sees. `stage` is set by whoever starts and ends cycles."""

    def __init__(
        self,
        *,
        paths: RunPaths,
        plan: AttemptPlan,
        facts: LaunchFacts,
        nodes: Nodes,
        hub: Hub,
        edge: Edge,
        exclude: tuple[str, ...],
    ) -> None:
        self._paths, self._plan, self._facts = paths, plan, facts
        self._policy = plan.policy
        self._nodes, self._hub, self._edge = nodes, hub, edge
        self._io = Worker("supervisor-io")
        self._scan: Scan | None = None
        self._vanishing = Vanishing()
        self._scan_every_s = max(1.0, self._policy.beat_interval_s)
        self._next_scan = 0.0
        self._ended_at: float | None = None
        self._signal: str | None = None
        self._verdicts: dict[str, int] = {}
        self._events: list[Event] = []
        self._history: History | None = None
        self.excluded: tuple[str, ...] = exclude
        self.resume_from: str | None = None
        self.drain_sent = self.save_sent = self.profile_sent = False
        self.copies = CopyState.NONE
        self._stage, self._stage_since = Stage.IDLE, time.monotonic()

    @property
    def is_signalled(self) -> bool:
        """Whether a signal asked the supervisor to leave."""
        return self._signal is not None

    def note_signal(self, name: str) -> None:
        """The supervisor got a signal."""
        self._signal = self._signal or name

    def exclude(self, names: Iterable[str]) -> None:
        """These nodes train no more in this attempt."""
        self.excluded = tuple(dict.fromkeys((*self.excluded, *names)))

    def learn(self, events: Iterable[Event]) -> None:
        """Events that are in the ledger now."""
        self._events.extend(events)
        self._history = None

    @property
    def history(self) -> History:
        """The run's past, checkpoints included that nobody could write down."""
        if self._history is None:
            entries = (self._scan.entries if self._scan is not None else None) or ()
            events = with_unrecorded_checkpoints(self._events, entries)
            self._history = replay(events, commits_that_reset=self._policy.commits_that_reset_backoff)
        return self._history

    @property
    def scan(self) -> Scan | None:
        """The newest look into the run directory."""
        return self._scan

    @property
    def counting(self) -> Counting:
        """Which checkpoints count, as of the newest look."""
        found = self._scan
        if found is None or found.entries is None or found.fences is None:
            return Counting(undecided=() if found is None else (Epoch(self._plan.attempt, 1, 0),))
        return count(found.entries, found.fences, run=self._facts.run)

    @property
    def stage(self) -> Stage:
        return self._stage

    @property
    def stage_s(self) -> float:
        """Seconds in this stage."""
        return time.monotonic() - self._stage_since

    def enter(self, stage: Stage) -> None:
        """The cycle has come to this stage."""
        self._stage, self._stage_since = stage, time.monotonic()
        self._ended_at = None

    def woken_by(self, heard: Heard) -> None:
        """Something ended or broke: look into the run directory at once."""
        found = len(heard.message.verdicts) if isinstance(heard.message, Report) else 0
        news = found > self._verdicts.get(heard.node, 0)
        self._verdicts[heard.node] = found
        if news or heard.message is None or isinstance(heard.message, Exited | Refused):
            self._ended_at = time.monotonic()
            self._next_scan = 0.0

    def refresh(self) -> bool:
        """Take in finished scans and ask for the next; True when there is enough to decide on. Raises RunDirGone."""
        now = time.monotonic()
        for result in self._io.results():
            if result.error is not None:
                raise result.error
            self._scan, self._history = result.value, None
            if self._vanishing.note(result.value.presence, now):
                raise RunDirGone(self._paths, self._plan.attempt)
        if now >= self._next_scan and self._io.pending == 0:
            self._next_scan = now + self._scan_every_s
            epoch, paths, attempt = self._nodes.epoch, self._paths, self._plan.attempt
            with_logs = self._ended_at is not None
            self._io.submit("scan", lambda: scan(paths, attempt, epoch, with_logs=with_logs))
        if self._stage is Stage.RUNNING and self._nodes.all_ended:
            self._stage, self._stage_since = Stage.ENDED, now
            self._ended_at = self._ended_at or now
        return self._is_settled(now)

    def scan_now(self) -> Scan:
        """A look in this thread, for moments when nothing trains anyway. Raises OSError."""
        self._scan = scan(self._paths, self._plan.attempt, self._nodes.epoch, with_logs=False)
        self._history = None
        return self._scan

    def _is_settled(self, now: float) -> bool:
        if self._scan is None or self._scan.presence is Presence.GONE:
            return False
        if self._ended_at is None:
            return True
        if self._scan.began >= self._ended_at and self._scan.epoch == self._nodes.epoch:
            return True
        if self._io.pending == 0:
            self._next_scan = 0.0
        return now - self._ended_at > _SCAN_PATIENCE_S

    def observe(self) -> CycleObservation:
        """One look, as decide_cycle takes it."""
        found = self._scan
        epoch = self._nodes.epoch or Epoch(self._plan.attempt, 1, 0)
        outcomes = self.outcomes
        signal = self._signal or self._nodes.signal
        return CycleObservation(
            epoch=epoch,
            stage=self._stage,
            stage_s=self.stage_s,
            now_unix=time.time(),
            num_nodes=self._plan.num_nodes,
            train_steps=self._facts.train_steps,
            nodes=self._observe_nodes(outcomes),
            outcomes=outcomes,
            signatures=found.signatures if found is not None else (),
            counting=self.counting,
            resume_from=self.resume_from,
            requests=self.requests,
            notice=None if signal is None else _NOTICES.get(signal),
            drain_sent=self.drain_sent,
            save_sent=self.save_sent,
            profile_sent=self.profile_sent,
            p99_s=self._nodes.p99_s(),
            excluded=self.excluded,
            copies=self.copies,
        )

    @property
    def requests(self) -> tuple[Request, ...]:
        """What people ask for and nobody has answered yet."""
        return () if self._scan is None else open_requests(self._scan.requests, self.history)

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """What the ranks of the newest cycle said when they ended."""
        found = self._scan
        return found.outcomes if found is not None and found.epoch == self._nodes.epoch else ()

    def _observe_nodes(self, outcomes: tuple[Outcome, ...]) -> tuple[NodeObservation, ...]:
        return tuple(
            self._nodes.observe(
                view,
                connected=self._hub.connected(view.name),
                silence_s=self._hub.silence_s(view.name),
                lost=self._edge.agent_dead(view.name),
                outcomes=outcomes,
            )
            for view in self._nodes.views.values()
        )

    def decide(self) -> Decision:
        """What to do now, and why."""
        return decide_cycle(self.observe(), self.history, self._policy)
