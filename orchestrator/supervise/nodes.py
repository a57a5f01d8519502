"""What the supervisor knows of its nodes: what their agents said last, turned into what health and decisions ask for.

No disk, no clock of its own: messages in, `NodeObservation`s out.
"""

from dataclasses import dataclass, field

from orchestrator.agent.messages import Exited, Hello, Refused, Report, Stopped, Verdict
from orchestrator.decide.observation import AgentVerdict, NodeObservation, RankObservation, VerdictKind
from orchestrator.state.epochs import Epoch
from orchestrator.state.records import Outcome, OutcomeKind
from orchestrator.supervise.edge import EdgeNode
from orchestrator.supervise.hub import Heard

_WELL = (OutcomeKind.DONE, OutcomeKind.DRAINED)


@dataclass(slots=True)
class NodeView:
    """One node. `node_rank` is that of the newest cycle it trained in; `answered` is its answer to the last Stop."""

    name: str
    address: str
    pid: int | None = None
    heard: bool = False
    defect: str | None = None
    metrics_port: int | None = None
    signal: str | None = None
    node_rank: int | None = None
    report: Report | None = None
    torchrun_exit: int | None = None
    answered: Stopped | None = None
    verdicts: dict[tuple[VerdictKind, int | None], AgentVerdict] = field(default_factory=dict)
    p99_s: dict[str, float] = field(default_factory=dict)


class Nodes:
    """All nodes of the allocation, by name in its order."""

    def __init__(self, nodes: tuple[EdgeNode, ...]) -> None:
        self.views = {node.name: NodeView(node.name, node.address) for node in nodes}
        self.epoch: Epoch | None = None

    @property
    def training(self) -> tuple[NodeView, ...]:
        """The nodes of the newest cycle, by node rank."""
        ranked = (view for view in self.views.values() if view.node_rank is not None)
        return tuple(sorted(ranked, key=lambda view: view.node_rank or 0))

    @property
    def signal(self) -> str | None:
        """A signal that some agent got, None if none did."""
        return next((view.signal for view in self.views.values() if view.signal is not None), None)

    def begin(self, epoch: Epoch, names: tuple[str, ...]) -> None:
        """A new cycle on these nodes in this order."""
        self.epoch = epoch
        for view in self.views.values():
            view.node_rank = names.index(view.name) if view.name in names else None
            view.report, view.torchrun_exit, view.answered = None, None, None
            view.verdicts = {}

    def take(self, heard: Heard, *, now_unix: float) -> None:
        """Take in a message (or the end of a connection, which `Hub.connected` tells by itself)."""
        view = self.views[heard.node]
        match heard.message:
            case Hello() as hello:
                view.heard, view.pid, view.defect = True, hello.pid, hello.defect
            case Report() as report:
                self._report(view, report, now_unix)
            case Exited() as exited if self._is_current(exited.cycle):
                view.torchrun_exit = exited.code
            case Stopped() as stopped if self._is_current(stopped.cycle):
                view.answered = stopped
            case Refused() as refused if self._is_current(refused.cycle):
                self._refuse(view, refused.why, now_unix)
            case _:
                return

    def _is_current(self, cycle: int) -> bool:
        return self.epoch is not None and cycle == self.epoch.cycle

    def _report(self, view: NodeView, report: Report, now_unix: float) -> None:
        view.signal = view.signal or report.signal
        view.metrics_port = report.metrics_port
        view.p99_s = report.p99_s
        if self._is_current(report.cycle):
            view.report = report
            for verdict in report.verdicts:
                view.verdicts.setdefault((verdict.kind, verdict.rank), _verdict(view.name, verdict, now_unix))

    def _refuse(self, view: NodeView, why: str, now_unix: float) -> None:
        view.torchrun_exit = 1
        found = AgentVerdict(
            kind=VerdictKind.PREFLIGHT,
            node=view.name,
            message=f"{view.name} did not start: {why}",
            fault_unix=now_unix,
            detected_unix=now_unix,
        )
        view.verdicts[(VerdictKind.PREFLIGHT, None)] = found

    @property
    def all_ended(self) -> bool:
        """Whether torchrun has ended, or never started, on every node of the cycle."""
        return all(view.torchrun_exit is not None for view in self.training)

    @property
    def step(self) -> int | None:
        """The highest step that any rank of the cycle completed; None while none has beaten."""
        return max((step for view in self.training for step in _steps(view)), default=None)

    @property
    def profile_ack(self) -> int:
        """The number of the newest profile order that every rank of the cycle has acknowledged."""
        reports = [view.report for view in self.training]
        return min((min(_profile_acks(report), default=0) for report in reports), default=0)

    @property
    def all_started(self) -> bool:
        """Whether every rank of the cycle is past INIT."""
        reports = [view.report for view in self.training]
        return all(
            report is not None and report.ranks and all(rank.phase not in (None, "init") for rank in report.ranks)
            for report in reports
        )

    def p99_s(self) -> dict[str, float]:
        """The largest p99 of each phase that a node has learned."""
        merged: dict[str, float] = {}
        for view in self.views.values():
            for phase, seconds in view.p99_s.items():
                merged[phase] = max(merged.get(phase, 0.0), seconds)
        return merged

    def observe(
        self,
        view: NodeView,
        *,
        connected: bool,
        silence_s: float | None,
        lost: str | None,
        outcomes: tuple[Outcome, ...],
    ) -> NodeObservation:
        """One node as health and decisions see it."""
        ranks = () if view.report is None or view.node_rank is None else view.report.ranks
        return NodeObservation(
            name=view.name,
            address=view.address,
            node_rank=view.node_rank,
            connected=connected,
            silence_s=silence_s,
            lost=lost,
            ready=view.defect is None if view.heard else None,
            defect=view.defect,
            torchrun_exit=_exit_code(view, outcomes),
            ranks=tuple(
                RankObservation(
                    rank=rank.rank,
                    node=view.name,
                    epoch=None if rank.phase is None else self.epoch,
                    phase=rank.phase,
                    step=rank.step,
                    beat_age_s=silence_s,
                    phase_age_s=rank.quiet_s,
                    process=rank.state,
                    collective_seq=rank.collective_seq,
                )
                for rank in ranks
            ),
            verdicts=tuple(view.verdicts.values()),
        )


def _exit_code(view: NodeView, outcomes: tuple[Outcome, ...]) -> int | None:
    """torchrun answers 1 for workers that left with 75: where all ranks ended well, so did their launcher."""
    if not view.torchrun_exit or view.report is None:
        return view.torchrun_exit
    said = {outcome.rank: outcome.kind for outcome in outcomes}
    ranks = view.report.ranks
    return 0 if ranks and all(said.get(rank.rank) in _WELL for rank in ranks) else view.torchrun_exit


def _steps(view: NodeView) -> list[int]:
    ranks = () if view.report is None else view.report.ranks
    return [rank.step for rank in ranks if rank.step is not None]


def _profile_acks(report: Report | None) -> list[int]:
    return [] if report is None else [rank.profile_ack for rank in report.ranks]


def _verdict(node: str, verdict: Verdict, now_unix: float) -> AgentVerdict:
    return AgentVerdict(
        kind=verdict.kind,
        node=node,
        rank=verdict.rank,
        phase=verdict.phase,
        step=verdict.step,
        exit_code=verdict.exit_code,
        message=f"{verdict.message} on {node}",
        fault_unix=now_unix - verdict.ago_s,
        detected_unix=now_unix,
    )
