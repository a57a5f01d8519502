"""Little worlds for the tests of the orchestrator's decisions: builders, a hand-turned clock, hypothesis strategies."""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from orchestrator.control.act import Launched
from orchestrator.decide.observation import (
    AgentVerdict,
    AttemptObservation,
    CycleObservation,
    Liveness,
    LogSignature,
    NodeObservation,
    RankObservation,
    RunObservation,
    Stage,
    StopNotice,
    VerdictKind,
)
from orchestrator.decide.policy import PHASES
from orchestrator.decide.taxonomy import FailureClass
from orchestrator.state.counting import Checkpoint, CheckpointEntry, Counting
from orchestrator.state.epochs import Epoch
from orchestrator.state.history import History, IncidentHistory, RunState
from orchestrator.state.records import Claim, Event, ExceptionInfo, Intent, Outcome, OutcomeKind, Request, Verb
from orchestrator.state.rundir import CheckpointName

EPOCH = Epoch(1, 1, 1)
NOW = 1_000_000.0


@dataclass
class HandClock:
    """Both clocks, moved by `sleep` and by hand."""

    unix: float = NOW
    mono: float = 0.0

    def now_unix(self) -> float:
        return self.unix

    def monotonic(self) -> float:
        return self.mono

    def sleep(self, seconds: float) -> None:
        self.unix += seconds
        self.mono += seconds


@dataclass
class FakeLauncher:
    """Counts launches; says what the test wants about liveness."""

    kind: str = "local"
    alive: Liveness = Liveness.ALIVE
    launched: list[int] = field(default_factory=list)
    error: Exception | None = None

    def liveness(self, intent: Intent | None, claim: Claim | None) -> tuple[Liveness, str]:
        if intent is not None and claim is not None and claim.nonce != intent.nonce:
            return Liveness.DEAD, "abandoned"
        return self.alive, "as the test says"

    def launch(self, *, paths: Any, attempt: int, nonce: str, exclude: tuple[str, ...]) -> Launched:
        self.launched.append(attempt)
        if self.error is not None:
            raise self.error
        return Launched(pid=4242)


def name(step: int, epoch: Epoch = EPOCH) -> str:
    return CheckpointName(step, epoch).text


def counting(*steps: int, epoch: Epoch = EPOCH) -> Counting:
    found = tuple(Checkpoint(name=name(s, epoch), step=s, epoch=epoch) for s in sorted(steps, reverse=True))
    return Counting(counted=found)


def rank(number: int, node: str, **more: Any) -> RankObservation:
    values: dict[str, Any] = {
        "epoch": EPOCH,
        "phase": "step",
        "step": 7,
        "beat_age_s": 0.1,
        "phase_age_s": 0.1,
        "process": "S",
        "collective_seq": 100,
    }
    return RankObservation(rank=number, node=node, **(values | more))


def node(
    index: int, *, spare: bool = False, ranks: tuple[RankObservation, ...] | None = None, **more: Any
) -> NodeObservation:
    label = f"node{index}"
    own = (rank(2 * index, label), rank(2 * index + 1, label)) if ranks is None and not spare else ranks or ()
    values: dict[str, Any] = {"silence_s": 0.2}
    return NodeObservation(name=label, node_rank=None if spare else index, ranks=own, **(values | more))


def cycle(*nodes: NodeObservation, **more: Any) -> CycleObservation:
    """Two training nodes of two ranks and a hot spare, all well, unless said otherwise."""
    values: dict[str, Any] = {
        "epoch": EPOCH,
        "stage": Stage.RUNNING,
        "stage_s": 60.0,
        "now_unix": NOW,
        "num_nodes": 2,
        "train_steps": 100,
    }
    return CycleObservation(nodes=nodes or (node(0), node(1), node(2, spare=True)), **(values | more))


def outcome(number: int, kind: OutcomeKind = OutcomeKind.CRASHED, **more: Any) -> Outcome:
    values: dict[str, Any] = {
        "rank": number,
        "node": f"node{number // 2}",
        "epoch": EPOCH,
        "kind": kind,
        "exit_code": 1,
        "step": 7,
        "phase": "step",
        "message": "",
        "written_unix": NOW - 10,
    }
    return Outcome(**(values | more))


def raised(number: int, type_: str, message: str, **more: Any) -> Outcome:
    return outcome(number, exception=ExceptionInfo(type=type_, message=message, frame="loop.py:10 run"), **more)


ECHO = "RuntimeError: Connection closed by peer [127.0.0.1]:1234"


def incident(cls: FailureClass = FailureClass.RANK_CRASH, *, fingerprint: str = "f", **more: Any) -> IncidentHistory:
    values: dict[str, Any] = {
        "id": "i",
        "epoch": EPOCH,
        "cls": str(cls),
        "rule": "restart-same-nodes",
        "level": "L1",
        "node": "node0",
        "rank": 0,
        "phase": "step",
        "step": 7,
        "fingerprint": fingerprint,
        "message": "it broke",
        "evidence": (),
        "fault_unix": None,
        "unix": NOW,
    }
    return IncidentHistory(**(values | more))


class Tape:
    """Writes events the way the processes of a run do."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.epoch = Epoch(0, 0, 0)
        self.seq = 0

    def add(self, kind: str, epoch: Epoch | None = None, **data: Any) -> "Tape":
        self.epoch = epoch or self.epoch
        self.seq += 1
        self.events.append(Event(epoch=self.epoch, seq=self.seq, writer="t", unix=NOW + self.seq, kind=kind, data=data))
        return self

    def attempt(self, number: int) -> "Tape":
        return self.add("attempt_intent", Epoch(number, 0, 0), attempt=number, nonce="n", launcher="local", exclude=[])

    def cycle(self, attempt: int, number: int, resume: str | None = None) -> "Tape":
        return self.add("cycle_started", Epoch(attempt, 1, number), nodes=["node0"], resume_from=resume)

    def commit(self, step: int) -> "Tape":
        return self.add("checkpoint_committed", name=name(step, self.epoch), step=step, bytes=1)

    def incident(self, cls: str = "rank_crash", fingerprint: str = "f", level: str = "L1") -> "Tape":
        return self.add("incident", **{"class": cls, "fingerprint": fingerprint, "level": level, "node": "node0"})


# --- strategies ------------------------------------------------------------------------------------------------------

epochs = st.builds(Epoch, st.integers(1, 4), st.integers(1, 2), st.integers(1, 5))
ages = st.none() | st.floats(0, 1e5)
texts = st.sampled_from(["", ECHO, "boom", "CUDA out of memory", "No space left on device", "ImportError: x"])
rank_seen = st.builds(
    RankObservation,
    rank=st.integers(0, 7),
    node=st.sampled_from(["node0", "node1", "node2", "node3"]),
    epoch=st.none() | epochs,
    phase=st.none() | st.sampled_from(PHASES),
    step=st.none() | st.integers(0, 200),
    beat_age_s=ages,
    phase_age_s=ages,
    process=st.none() | st.sampled_from(["R", "S", "D", "T", "Z", "gone"]),
    collective_seq=st.none() | st.integers(0, 9),
)
verdict_seen = st.builds(
    AgentVerdict,
    kind=st.sampled_from(VerdictKind),
    node=st.sampled_from(["node0", "node1"]),
    rank=st.none() | st.integers(0, 7),
    exit_code=st.none() | st.sampled_from([-15, -9, 1, 78, 88, 93]),
    message=texts,
    fault_unix=st.none() | st.floats(NOW - 100, NOW),
)
outcome_seen = st.builds(
    Outcome,
    rank=st.integers(0, 7),
    node=st.none() | st.sampled_from(["node0", "node1"]),
    epoch=st.just(EPOCH) | epochs,
    kind=st.sampled_from(OutcomeKind),
    exit_code=st.sampled_from([0, 1, 75, 78, 90, 93]),
    step=st.none() | st.integers(0, 200),
    phase=st.none() | st.sampled_from(PHASES),
    message=texts,
    exception=st.none() | st.builds(ExceptionInfo, type=st.sampled_from(["ValueError", "OSError"]), message=texts),
    checkpoint=st.none() | st.just(name(10)),
    written_unix=st.floats(NOW - 100, NOW + 10),
)


@st.composite
def nodes_seen(draw: st.DrawFn) -> tuple[NodeObservation, ...]:
    many = draw(st.integers(0, 6))
    return tuple(
        NodeObservation(
            name=f"node{i}",
            node_rank=draw(st.none() | st.just(i)),
            connected=draw(st.booleans()),
            silence_s=draw(ages),
            lost=draw(st.none() | st.just("NODE_FAIL")),
            ready=draw(st.sampled_from([True, False, None])),
            torchrun_exit=draw(st.none() | st.sampled_from([0, 1, -9])),
            ranks=tuple(draw(st.lists(rank_seen, max_size=2))),
            verdicts=tuple(draw(st.lists(verdict_seen, max_size=2))),
        )
        for i in range(many)
    )


countings = st.builds(
    lambda steps, undecided: Counting(counted=counting(*steps).counted, undecided=undecided),
    st.sets(st.integers(1, 120), max_size=4),
    st.just(()) | st.just((Epoch(2, 1, 1),)),
)
requests_seen = st.lists(
    st.builds(Request, verb=st.sampled_from(Verb), by=st.just("me"), created_unix=st.just(NOW), id=st.just("01X")),
    max_size=2,
).map(tuple)
cycles_seen = st.builds(
    CycleObservation,
    epoch=st.just(EPOCH),
    stage=st.sampled_from(Stage),
    stage_s=st.floats(0, 1e4),
    now_unix=st.just(NOW),
    num_nodes=st.integers(1, 4),
    train_steps=st.integers(1, 150),
    nodes=nodes_seen(),
    outcomes=st.lists(outcome_seen, max_size=4).map(tuple),
    signatures=st.lists(st.builds(LogSignature, node=st.just("node0"), line=texts), max_size=2).map(tuple),
    counting=countings,
    resume_from=st.none() | st.just(name(10)),
    requests=requests_seen,
    notice=st.none() | st.sampled_from(StopNotice),
    drain_sent=st.booleans(),
    save_sent=st.booleans(),
    profile_sent=st.booleans(),
    p99_s=st.dictionaries(st.sampled_from(PHASES), st.floats(0, 100)),
    loop_late_s=st.floats(0, 100),
    excluded=st.lists(st.sampled_from(["node0", "node3"]), max_size=1).map(tuple),
)

EVENT_KINDS = (
    "run_created",
    "attempt_intent",
    "attempt_submitted",
    "attempt_started",
    "cycle_started",
    "cycle_running",
    "incident",
    "teardown",
    "decision",
    "recovered",
    "checkpoint_committed",
    "checkpoint_quarantined",
    "cycle_ended",
    "attempt_ended",
    "run_done",
    "run_held",
    "run_failed",
    "request",
    "request_done",
    "resumed",
    "export",
    "from_the_future",
)
_values = st.none() | st.booleans() | st.integers(-5, 300) | st.sampled_from(["lost", "held", "done", "L1", name(5)])
_fields = (
    "attempt",
    "step",
    "name",
    "outcome",
    "class",
    "fingerprint",
    "level",
    "node",
    "nodes",
    "reason",
    "id",
    "exclude",
)
events_seen = st.builds(
    Event,
    epoch=epochs,
    seq=st.integers(1, 60),
    writer=st.sampled_from(["a", "b"]),
    unix=st.floats(NOW, NOW + 1e5),
    kind=st.sampled_from(EVENT_KINDS),
    data=st.dictionaries(st.sampled_from(_fields), _values | st.lists(_values, max_size=2)),
)
histories = st.builds(
    History,
    state=st.sampled_from(RunState),
    unresolved=st.lists(
        st.builds(incident, st.sampled_from(FailureClass), fingerprint=st.sampled_from(["f", "g"])), max_size=6
    ).map(tuple),
    cycles_without_progress=st.integers(0, 7),
    streak=st.integers(0, 9),
    ever_stepped=st.booleans(),
    best_step=st.integers(0, 50),
)
attempts_seen = st.none() | st.builds(
    AttemptObservation, attempt=st.integers(1, 9), liveness=st.sampled_from(Liveness), why=st.just("so"), age_s=ages
)
runs_seen = st.builds(
    RunObservation,
    now_unix=st.just(NOW),
    launcher=st.sampled_from(["local", "slurm"]),
    train_steps=st.none() | st.integers(1, 150),
    last=attempts_seen,
    counting=countings,
    requests=requests_seen,
    problems=st.just(()) | st.just(("ledger/: cannot be listed",)),
)
entries_seen = st.lists(
    st.builds(
        CheckpointEntry,
        entry=st.builds(name, st.integers(1, 9), epochs)
        | st.builds(lambda s, e: f".{name(s, e)}.partial", st.integers(1, 9), epochs)
        | st.sampled_from(["30", "9999", "tmp-40", "50", "step-5", ".trash-x", "latest"])
        | st.text(max_size=12),
        defect=st.none() | st.just("a file is missing"),
    ),
    max_size=10,
    unique_by=lambda e: e.entry,
).map(tuple)
