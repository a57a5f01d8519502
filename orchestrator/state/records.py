"""Every record the two packages and the processes of a run share, as frozen data.

    run.yaml ─▶ launch_facts.json           what a run asks for
    attempts/N/ intent.json claim nodes.json            who tries, and where
    cycles/N/   cycle.json ─▶ trainer ─▶ train.jsonl validation.jsonl outcomes/rank-….json
    checkpoints/step-…/ manifest.json       (index.json: checkpoint_index.py)
    control/<verb>-<ulid>                   what a person asks for
    ledger/<writer>.jsonl                   what happened

Each `parse_x(text)` returns the record or `Unreadable(why)`; it never raises and never guesses. Unknown fields are
ignored, another major schema version is refused. Steps count completed optimizer updates from 1; times ending in
`_unix` are seconds since 1970; sizes are bytes.
"""

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from orchestrator.state import facts
from orchestrator.state.codec import decode
from orchestrator.state.epochs import Epoch as Epoch

SCHEMA_VERSION = 1

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A record that could not be read: a value of its own, never "absent" and never a default."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPerRank:
    """Estimated bytes on the fullest rank, by purpose; which pipeline rank it is, with which stages."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    total: int
    scratch: int | None = None
    pp_rank: int | None = None
    stages: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFacts:
    """What the orchestrator needs to know of the training, answered by `python -m trainer check`."""

    schema_version: int = SCHEMA_VERSION
    run: str
    project: str
    world_size: int
    dp: int
    pp: int
    tp: int
    cp: int
    tokens_per_step: int
    samples_per_step: int
    sequence_length: int
    train_steps: int
    train_samples: int | None = None
    checkpoint_interval: int
    checkpoint_bytes: int
    num_params: int
    flops_per_step: float
    flops_per_step_full_attn: float
    flops_per_step_megatron: float
    memory_per_rank_bytes: MemoryPerRank
    compute_dtype: str
    config_digest: str
    vocab_size: int
    tokenizer: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleNode:
    """A node that trains in a cycle; `node_rank` is torchrun's."""

    node_rank: int
    name: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """cycle.json: one launch inside an attempt, written before its ranks start."""

    schema_version: int = SCHEMA_VERSION
    run: str
    epoch: Epoch
    nonce: str
    resume_from: str | None
    skip_windows: tuple[tuple[int, int], ...] = ()
    nodes: tuple[CycleNode, ...]
    ranks_per_node: int
    world_size: int
    master_addr: str
    master_port: int
    config: str = "run.yaml"
    beat_interval_s: float
    created_unix: float


class OutcomeKind(StrEnum):
    """How one rank's launch ended, in the trainer's own words."""

    DONE = "done"
    DRAINED = "drained"
    CONFIG_ERROR = "config_error"
    NONFINITE = "nonfinite"
    SPIKE = "spike"
    DATA_ERROR = "data_error"
    CHECKPOINT_INVALID = "checkpoint_invalid"
    DESYNC = "desync"
    HANG = "hang"
    CRASHED = "crashed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExceptionInfo:
    """The exception that ended a rank; `frame` is its innermost "file:line function" of our code."""

    type: str
    message: str
    frame: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """outcomes/rank-00042.json: written by the rank just before it exits. `suspects`: ranks it takes for the cause."""

    schema_version: int = SCHEMA_VERSION
    rank: int
    node: str | None = None
    epoch: Epoch
    kind: OutcomeKind
    exit_code: int
    step: int | None
    phase: str | None
    message: str
    exception: ExceptionInfo | None = None
    checkpoint: str | None = None
    bad_file: str | None = None
    suspects: tuple[int, ...] = ()
    written_unix: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestState:
    """The run state at a checkpoint besides tensors."""

    step: int
    consumed_samples: int
    consumed_tokens: int
    adam_t: int
    skip_windows: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFile:
    """A file of a checkpoint with its size and xxh3 digest (hex)."""

    name: str
    bytes: int
    xxh3: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """manifest.json: written last, so that a checkpoint with a readable one was complete when it was named."""

    schema_version: int = SCHEMA_VERSION
    run: str
    step: int
    epoch: str
    state: ManifestState
    model_config: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, Any] | None = None
    files: tuple[ManifestFile, ...]
    total_bytes: int
    pawl_version: str
    torch_version: str
    created_unix: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """attempts/N/intent.json: written by whoever made the attempt's directory, before launching."""

    schema_version: int = SCHEMA_VERSION
    attempt: int
    nonce: str
    launcher: str
    by: str
    created_unix: float
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """attempts/N/claim: who runs this attempt. (host, boot_id, pid, start_ticks) name one process for ever."""

    schema_version: int = SCHEMA_VERSION
    nonce: str
    host: str
    pid: int
    start_ticks: int
    boot_id: str
    job_id: str | None = None
    created_unix: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptNode:
    """A node of an attempt's allocation. `spare`: it does not train in the newest cycle (before the first: by plan)."""

    name: str
    address: str
    spare: bool
    agent_pid: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptNodes:
    """attempts/N/nodes.json."""

    schema_version: int = SCHEMA_VERSION
    nodes: tuple[AttemptNode, ...]


class Verb(StrEnum):
    """What a person may ask of a run."""

    DRAIN = "drain"
    SAVE_NOW = "save-now"
    CANCEL = "cancel"
    PROFILE = "profile"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """control/<verb>-<ulid>: acted on once, acknowledged in the ledger by the ulid.

    A profile says how many `steps` are recorded (None: the default) and on which `ranks` (None: on all).
    """

    schema_version: int = SCHEMA_VERSION
    verb: Verb
    by: str
    created_unix: float
    id: str = ""
    steps: int | None = None
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One ledger line. Merged by (epoch, seq, writer), never by wall clock."""

    schema_version: int = SCHEMA_VERSION
    epoch: Epoch
    seq: int
    writer: str
    unix: float
    kind: str
    data: dict[str, Any]

    @property
    def order(self) -> tuple[Epoch, int, str]:
        return (self.epoch, self.seq, self.writer)


def parse(cls: type[R], text: str | None) -> R | Unreadable:
    """The record `cls` in `text`, or why not. `text` None means that the file could not be read."""
    if text is None:
        return Unreadable(why="no such file, or not readable")
    try:
        data = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return Unreadable(why=f"not JSON: {error}")
    if not isinstance(data, dict):
        return Unreadable(why="not a JSON object")
    version = data.get("schema_version")
    if type(version) is not int:
        return Unreadable(why=f"schema_version is {version!r}, expected {SCHEMA_VERSION}")
    if version != SCHEMA_VERSION:
        return Unreadable(why=f"schema_version {version} is not the version {SCHEMA_VERSION} that this pawl reads")
    try:
        return decode(cls, data, where=cls.__name__.lower())
    except (ValueError, TypeError) as error:
        return Unreadable(why=str(error))


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def parse_launch_facts(text: str | None) -> LaunchFacts | Unreadable:
    return parse(LaunchFacts, text)


def parse_cycle(text: str | None) -> Cycle | Unreadable:
    return parse(Cycle, text)


def parse_outcome(text: str | None) -> Outcome | Unreadable:
    return parse(Outcome, text)


def parse_manifest(text: str | None) -> Manifest | Unreadable:
    return parse(Manifest, text)


def parse_intent(text: str | None) -> Intent | Unreadable:
    return parse(Intent, text)


def parse_claim(text: str | None) -> Claim | Unreadable:
    return parse(Claim, text)


def parse_attempt_nodes(text: str | None) -> AttemptNodes | Unreadable:
    return parse(AttemptNodes, text)


def parse_request(text: str | None) -> Request | Unreadable:
    return parse(Request, text)


def parse_event(text: str | None) -> Event | Unreadable:
    """A ledger line; one whose data does not fit its kind (facts.py), or whose text no file can hold, is unreadable."""
    event = parse(Event, text)
    if isinstance(event, Unreadable):
        return event
    epoch = event.epoch
    why = facts.defect(event.kind, (epoch.attempt, epoch.generation, epoch.cycle), event.seq, event.data)
    if why is not None:
        return Unreadable(why=why)
    try:
        (event.writer + event.kind).encode()
        json.dumps(event.data, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return Unreadable(why="it holds half a character (a lone surrogate)")
    return event
