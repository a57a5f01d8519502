"""What every surface shows of a run: one frozen, JSON-able RunView.

status, watch, report, explain, serve and the metrics all read this and nothing else, so they cannot disagree. Unknown
is None. A number that was true once and may not be now stands beside `stale: true`; it is never passed off as fresh.
Steps count completed optimizer updates; `_s` are seconds, `_unix` seconds since 1970, `_bytes` bytes, ratios 0–1.
"""

from dataclasses import dataclass
from enum import StrEnum

VIEW_VERSION = 1


class RunState(StrEnum):
    """Where a run stands. UNKNOWN and LOST are values of their own: never "dead", never "done"."""

    CREATED = "created"
    QUEUED = "queued"
    STARTING = "starting"
    TRAINING = "training"
    RECOVERING = "recovering"
    DONE = "done"
    DRAINED = "drained"
    HELD = "held"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"
    UNKNOWN = "unknown"

    @property
    def is_over(self) -> bool:
        """True when nothing more happens by itself."""
        return self in _OVER


_OVER = {RunState.DONE, RunState.DRAINED, RunState.HELD, RunState.FAILED, RunState.CANCELLED}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshView:
    """The layout of the ranks."""

    dp: int
    pp: int
    tp: int
    cp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressView:
    """The training as it stands, from the newest step line. `stale`: measured too long ago to be now."""

    step: int | None
    train_steps: int | None
    tokens: int | None
    loss: float | None
    grad_norm: float | None
    lr: float | None
    tokens_per_s: float | None
    step_time_s: float | None
    mfu: float | None
    mfu_full_attn: float | None
    mfu_megatron: float | None
    validation_loss: float | None
    measured_unix: float | None
    stale: bool
    eta_s: float | None
    skipped_steps: int
    nonfinite_steps: int
    recomputed_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """One rank of the running cycle."""

    rank: int
    pid: int | None
    phase: str | None
    step: int | None
    beat_age_s: float | None
    phase_age_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBeat:
    """The newest beat of a node as it was read. `age_s`: seconds since it was written."""

    name: str
    age_s: float | None
    ranks: tuple[RankView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One node of the attempt. `role`: train, spare or excluded. `stale` None: no beat was ever seen."""

    name: str
    address: str | None
    role: str
    beat_age_s: float | None
    stale: bool | None
    ranks: tuple[RankView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptView:
    """One job (or local launch) of the run."""

    attempt: int
    launcher: str | None
    job_id: str | None
    host: str | None
    pid: int | None
    submitted_unix: float | None
    started_unix: float | None
    ended_unix: float | None
    outcome: str | None
    rule: str | None
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleView:
    """One launch inside an attempt. `first_step_unix`: when its first step was seen."""

    epoch: str
    started_unix: float
    ended_unix: float | None
    first_step_unix: float | None
    nodes: tuple[str, ...]
    resume_from: str | None
    outcome: str | None
    last_step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointView:
    """A checkpoint on disk or in the ledger; `why_not` says why it does not count."""

    name: str
    step: int
    epoch: str
    bytes: int | None
    committed_unix: float | None
    counts: bool
    why_not: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CostView:
    """What an incident cost: fault → noticed → torn down (→ waited) → started → loaded; lost steps were redone.

    The parts are None where another attempt trained on: only the sum can be known then.
    """

    detection_s: float | None
    teardown_s: float | None
    backoff_s: float | None
    start_s: float | None
    load_s: float | None
    total_s: float | None
    lost_steps: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionView:
    """What pawl decided, by which rule, and why."""

    unix: float
    epoch: str
    rule: str | None
    action: str | None
    level: str | None
    reason: str | None
    backoff_s: float | None
    exclude: tuple[str, ...]
    resume_from: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentView:
    """One abnormal event; `failure_class` is the row of the failure table. `cost` None: not recovered (yet)."""

    id: str
    unix: float
    epoch: str
    failure_class: str | None
    rule: str | None
    level: str | None
    node: str | None
    rank: int | None
    phase: str | None
    step: int | None
    message: str | None
    evidence: tuple[str, ...]
    fault_unix: float | None
    recovered_unix: float | None
    cost: CostView | None
    decision: DecisionView | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputView:
    """Wall time by category; the values of `seconds` sum to `wall_s`. `rank_seconds`: the same, times ranks held."""

    wall_s: float
    seconds: dict[str, float]
    rank_seconds: dict[str, float]
    productive_ratio: float | None
    ettr: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """What a person asked of the run; `result` None: not acted on yet."""

    verb: str
    id: str
    by: str | None
    unix: float | None
    result: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StopView:
    """Why a run is HELD, FAILED or otherwise over, and the hint that goes with it."""

    rule: str | None
    reason: str | None
    hint: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageView:
    """The run and checkpoint that this run was forked from. `weights_only`: it began at step 0 with their weights."""

    run: str | None
    run_dir: str | None
    step: int | None
    checkpoint: str | None
    digest: str | None
    weights_only: bool | None
    by: str | None
    why: str | None
    unix: float

    @property
    def text(self) -> str:
        """demo@4000 (step-000004000.a0001g01c0001), weights only"""
        step = "an unknown step" if self.step is None else str(self.step)
        only = ", weights only" if self.weights_only else ""
        return f"{self.run or 'an unknown run'}@{step} ({self.checkpoint or 'unknown checkpoint'}){only}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiesView:
    """Copies behind a URL. `failed`: what failed and was not made good since, a sentence each."""

    place: str | None
    count: int
    newest_step: int | None
    failed: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """Everything there is to show of one run, at `now_unix`."""

    schema_version: int = VIEW_VERSION
    now_unix: float
    run: str
    run_dir: str
    project: str | None
    state: RunState
    state_reason: str | None
    stop: StopView | None
    launcher: str | None
    by: str | None
    created_unix: float | None
    ended_unix: float | None
    world_size: int | None
    mesh: MeshView | None
    num_params: int | None
    tokens_per_step: int | None
    compute_dtype: str | None
    supervisor_alive: bool | None
    progress: ProgressView
    attempts: tuple[AttemptView, ...]
    cycles: tuple[CycleView, ...]
    nodes: tuple[NodeView, ...]
    checkpoints: tuple[CheckpointView, ...]
    incidents: tuple[IncidentView, ...]
    decisions: tuple[DecisionView, ...]
    requests: tuple[RequestView, ...]
    goodput: GoodputView
    metrics_addresses: tuple[str, ...]
    profiles: tuple[str, ...]
    problems: tuple[str, ...]
    lineage: LineageView | None = None
    copies: CopiesView | None = None

    @property
    def lost_spares(self) -> tuple[str, ...]:
        """A sentence for each loss of nodes of the newest attempt that did not train."""
        newest = f"a{self.attempts[-1].attempt:04d}" if self.attempts else ""
        losses = (d for d in self.decisions if d.rule == "spare-lost" and newest and d.epoch.startswith(newest))
        return tuple(decision.reason for decision in losses if decision.reason)

    @property
    def last_decision(self) -> DecisionView | None:
        return self.decisions[-1] if self.decisions else None

    @property
    def newest_checkpoint(self) -> CheckpointView | None:
        """The newest that counts; checkpoints are listed newest first."""
        return next((checkpoint for checkpoint in self.checkpoints if checkpoint.counts), None)
