"""What was seen of the world, as frozen data: the input of assess and decide. Unknown is None, never 0, never "dead".

    CycleObservation   one look of a supervisor: nodes, their ranks, outcomes, requests, checkpoints
    RunObservation     one look of a controller: the attempts of a run and whether the last one may still be alive

Ages are seconds on the monotonic clock of whoever measured them; they are never differences of wall clocks.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from orchestrator.state.counting import Counting
from orchestrator.state.epochs import Epoch
from orchestrator.state.records import Claim, Intent, Outcome, Request


class VerdictKind(StrEnum):
    """What an agent found out about a process of its node."""

    EXITED = "exited"
    STOPPED = "stopped"
    PHASE_LIMIT = "phase_limit"
    OUT_OF_MEMORY = "out_of_memory"
    PREFLIGHT = "preflight"
    GPU = "gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentVerdict:
    """An agent's finding with its evidence (paths relative to the run directory). Times in unix seconds."""

    kind: VerdictKind
    node: str
    rank: int | None = None
    phase: str | None = None
    step: int | None = None
    exit_code: int | None = None
    message: str = ""
    fault_unix: float | None = None
    detected_unix: float | None = None
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSignature:
    """A line of a log that a known pattern matched; `unix` is the time in the line, if it has one."""

    node: str
    line: str
    unix: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankObservation:
    """The newest beat of one rank and the state of its process, as its agent sees them.

    `phase` is a lower-case name of `policy.PHASES`. `phase_age_s` counts from the last change of phase or step.
    `process` is the kernel's letter (R S D T t Z X), "gone" when the pid is no longer there, None when unknown.
    """

    rank: int
    node: str
    epoch: Epoch | None = None
    phase: str | None = None
    step: int | None = None
    beat_age_s: float | None = None
    phase_age_s: float | None = None
    process: str | None = None
    collective_seq: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeObservation:
    """One node of the allocation. `node_rank` is None for nodes that do not train in this cycle.

    `silence_s`: since the last message of its agent, on the supervisor's clock; None when it never spoke.
    `lost`: hard evidence that the node is gone (Slurm's word, the agent's process seen dead), else None.
    `ready`: the preflight passed; False says why in `defect`. None: not known yet.
    `torchrun_exit`: exit code of this cycle's torchrun, None while it runs or when none was started.
    """

    name: str
    address: str = "127.0.0.1"
    node_rank: int | None = None
    connected: bool = True
    silence_s: float | None = None
    lost: str | None = None
    ready: bool | None = True
    defect: str | None = None
    torchrun_exit: int | None = None
    ranks: tuple[RankObservation, ...] = ()
    verdicts: tuple[AgentVerdict, ...] = ()


class Stage(StrEnum):
    """Where the cycle stands: none yet, or the last one is cleaned up · its ranks run · all of them ended."""

    IDLE = "idle"
    RUNNING = "running"
    ENDED = "ended"


class CopyState(StrEnum):
    """Copies of checkpoints behind a URL. NONE: the ledger knows of none; ASKED: the place has answered."""

    NONE = "none"
    UNASKED = "unasked"
    FETCHING = "fetching"
    ASKED = "asked"


class StopNotice(StrEnum):
    """Why this allocation must be left soon."""

    TIME_LIMIT = "time_limit"
    PREEMPTED = "preempted"


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleObservation:
    """One look of the supervisor. `stage_s`: seconds in this stage. `num_nodes`: nodes that a cycle needs.

    `p99_s`: learned 99th percentile of each phase's duration (absent: not learned yet). `loop_late_s`: how much later
    than planned this look happens. `requests`: those not yet acknowledged. `excluded`: nodes that must not train.
    """

    epoch: Epoch
    stage: Stage
    stage_s: float
    now_unix: float
    num_nodes: int
    train_steps: int
    nodes: tuple[NodeObservation, ...]
    outcomes: tuple[Outcome, ...] = ()
    signatures: tuple[LogSignature, ...] = ()
    counting: Counting = field(default_factory=Counting)
    resume_from: str | None = None
    requests: tuple[Request, ...] = ()
    notice: StopNotice | None = None
    drain_sent: bool = False
    save_sent: bool = False
    profile_sent: bool = False
    p99_s: dict[str, float] = field(default_factory=dict)
    loop_late_s: float = 0.0
    excluded: tuple[str, ...] = ()
    copies: CopyState = CopyState.NONE

    @property
    def training(self) -> tuple[NodeObservation, ...]:
        """The nodes of the running cycle, by node rank."""
        return tuple(sorted((n for n in self.nodes if n.node_rank is not None), key=lambda n: n.node_rank or 0))

    @property
    def ranks(self) -> tuple[RankObservation, ...]:
        """All ranks of the running cycle."""
        return tuple(rank for node in self.training for rank in node.ranks)


class Liveness(StrEnum):
    """May something of an attempt still run? PENDING: made, but nobody has claimed it yet."""

    PENDING = "pending"
    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptObservation:
    """The newest attempt. `age_s`: since its intent was written (None: unknown). `why` says how liveness was found."""

    attempt: int
    liveness: Liveness
    why: str
    intent: Intent | None = None
    claim: Claim | None = None
    age_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunObservation:
    """One look of the controller. `last` None: no attempt was ever made. `problems`: what could not be read."""

    now_unix: float
    launcher: str
    train_steps: int | None
    last: AttemptObservation | None
    counting: Counting = field(default_factory=Counting)
    requests: tuple[Request, ...] = ()
    problems: tuple[str, ...] = ()
