"""What supervisor and agents say to each other: frozen data, checked field by field on arrival.

    agent ─▶ supervisor   Hello · Report (every beat) · Exited · Stopped · Refused
    supervisor ─▶ agent   Start · Control · Profile · Stop · Quit · Alive (every beat)

A cycle is named by number only: what is to run stands in files of the run directory that the agent reads and checks for
itself, so whoever could speak here could still not make a node run something else. Durations are seconds on the
sender's monotonic clock; no wall clock of one machine is compared with that of another.
"""

from dataclasses import dataclass, field
from typing import Any, get_args

from orchestrator.decide.observation import VerdictKind
from orchestrator.state.codec import decode, encode
from orchestrator.state.records import Unreadable


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One rank as its agent sees it. phase and step are None before its first beat of this cycle.

    `state` is the kernel's letter, None while the process is not known and "gone" after it ended. `quiet_s`: since
    phase or step last moved. `stats`: counters over all cycles of this agent, None where unknown.
    """

    rank: int
    pid: int | None = None
    state: str | None = None
    phase: str | None = None
    step: int | None = None
    quiet_s: float
    collective_seq: int | None = None
    control_ack: int = 0
    profile_ack: int = 0
    loss: float | None = None
    tokens: int = 0
    stats: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What an agent concluded about a rank. `ago_s`: how long ago that began; `limit_s`: what is allowed, if limited.

    `exit_code` is torchrun's word about the rank; a negative one is minus the signal.
    """

    kind: VerdictKind
    rank: int
    phase: str | None
    step: int | None
    quiet_s: float
    limit_s: float | None
    message: str
    ago_s: float = 0.0
    exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First message of an agent, again after each reconnection. `defect`: why this node must not train, or None."""

    node: str
    pid: int
    attempt: int
    cycle: int = 0
    defect: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The beat of a node. `cycle` 0 and no ranks: nothing runs here. `late`: the agent's own loop was held up."""

    cycle: int
    running: bool
    ranks: tuple[RankReport, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    p99_s: dict[str, float] = field(default_factory=dict)
    signal: str | None = None
    late: bool = False
    metrics_port: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRank:
    """A rank that torchrun saw fail; a negative exit code is minus the signal."""

    rank: int
    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """torchrun of the cycle ended by itself."""

    cycle: int
    code: int
    failed: tuple[FailedRank, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """Nothing of the cycle runs here any more, except `remaining` processes that SIGKILL could not end.

    `evidence`: paths relative to the run directory. `stopped_ranks`: ranks found in state T.
    """

    cycle: int
    seconds: float
    killed: int
    remaining: int
    evidence: tuple[str, ...] = ()
    stopped_ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The agent will not or cannot start the cycle."""

    cycle: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Run this cycle (its cycle.json lies in the run directory)."""

    cycle: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """Put this word (none, save, drain) into the ranks' shared memory."""

    cycle: int
    word: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Ask the cycle's ranks to record `steps` steps on these ranks (None: on all); `number` rises in a cycle from 1."""

    cycle: int
    number: int
    steps: int
    ranks: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End everything of the cycle; `evidence`: dump stacks first."""

    cycle: int
    evidence: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Quit:
    """The attempt is over: clean up and exit."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """The supervisor's own beat."""

    generation: int


Message = Hello | Report | Exited | Stopped | Refused | Start | Control | Profile | Stop | Quit | Alive
_KINDS: dict[str, type[Message]] = {kind.__name__.lower(): kind for kind in get_args(Message)}


def to_wire(message: Message) -> dict[str, Any]:
    """The channel's body of a message. Numbers must be finite (the sender maps unknown to None)."""
    return {"kind": type(message).__name__.lower(), "data": encode(message)}


def from_wire(body: dict[str, Any]) -> Message | Unreadable:
    """The message of a body, or why it is none."""
    kind = _KINDS.get(str(body.get("kind")))
    if kind is None:
        return Unreadable(why=f"message kind {str(body.get('kind'))[:40]!r} is not known")
    try:
        return decode(kind, body.get("data"), where=kind.__name__.lower())
    except (ValueError, TypeError) as error:
        return Unreadable(why=str(error))
