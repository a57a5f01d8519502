"""The failure table: class → how it is treated. The only place where a class of failure has an opinion attached.

    ladder     levels in the order they are tried; two incidents with one fingerprint on a level move to the next
    exclude    does the named node leave: never, when its fingerprint recurs, at once
    budget     restarts of this class allowed without a newly committed checkpoint; None: unlimited (the general
               ceiling of cycles without a checkpoint holds for every class)
    final      what the run is when ladder or budget is used up: HELD (resumable as it is), FAILED (needs an edit)
    backoff    does a restart wait

L1 new cycle on the same nodes → L2 a hot spare for the named node → L3 queued successor → L4 a new attempt → L5 stop.
"""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """Rungs of the recovery ladder, cheapest first."""

    L1 = "L1"
    L2 = "L2"
    L3 = "L3"
    L4 = "L4"
    L5 = "L5"


class FailureClass(StrEnum):
    """What kind of thing went wrong."""

    NODE_DOWN = "node_down"
    GPU_HW = "gpu_hw"
    FABRIC = "fabric"
    HANG_COLLECTIVE = "hang_collective"
    HANG_LOCAL = "hang_local"
    RANK_CRASH = "rank_crash"
    HOST_OOM = "host_oom"
    CUDA_OOM = "cuda_oom"
    NONFINITE = "nonfinite"
    LOSS_SPIKE = "loss_spike"
    DESYNC = "desync"
    DATA_ERROR = "data_error"
    CHECKPOINT_INVALID = "checkpoint_invalid"
    STORAGE = "storage"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time_limit"
    START_FAIL = "start_fail"
    CONFIG = "config"
    STRAGGLER = "straggler"
    SLURM_DOWN = "slurm_down"
    CANCELLED = "cancelled"
    DO_NOT_RESTART = "do_not_restart"
    UNKNOWN = "unknown"


class Exclusion(StrEnum):
    """When the node an incident names is left out."""

    NEVER = "never"
    RECURRENCE = "recurrence"
    ALWAYS = "always"


class Final(StrEnum):
    """How a run stands when pawl stops relaunching it."""

    HELD = "held"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """One row of the failure table."""

    evidence: str
    ladder: tuple[Level, ...]
    exclude: Exclusion = Exclusion.NEVER
    budget: int | None
    final: Final = Final.HELD
    backoff: bool = True
    hint: str


_L1, _L2, _L3, _L4 = Level.L1, Level.L2, Level.L3, Level.L4
_F = FailureClass

TABLE: dict[FailureClass, Treatment] = {
    _F.NODE_DOWN: Treatment(
        evidence="agent silent, connection gone, or Slurm says NODE_FAIL",
        ladder=(_L2, _L4), exclude=Exclusion.ALWAYS, budget=10,
        hint="tell the administrators which node it was; spares (`recovery.spares`) make this cheaper",
    ),
    _F.GPU_HW: Treatment(
        evidence="XID 48 63 64 74 79 94 95, ECC, device off the bus",
        ladder=(_L2, _L4), exclude=Exclusion.ALWAYS, budget=10,
        hint="ask for the node to be drained and its GPU tested",
    ),
    _F.FABRIC: Treatment(
        evidence="link down, IB error, NCCL remote error localised to a node",
        ladder=(_L1, _L2, _L4), exclude=Exclusion.RECURRENCE, budget=5,
        hint="look at the link of the named node",
    ),
    _F.HANG_COLLECTIVE: Treatment(
        evidence="every rank in STEP, no step advance",
        ladder=(_L1, _L2, _L4), exclude=Exclusion.RECURRENCE, budget=3,
        hint="read the stacks in the evidence folder: every rank waits in the same collective",
    ),
    _F.HANG_LOCAL: Treatment(
        evidence="one rank stopped, or behind the others and past its phase limit",
        ladder=(_L1, _L2, _L4), exclude=Exclusion.RECURRENCE, budget=3,
        hint="read the stack of the named rank in the evidence folder",
    ),
    _F.RANK_CRASH: Treatment(
        evidence="a rank's process ended by a signal or an exception",
        ladder=(_L1, _L2, _L4), exclude=Exclusion.RECURRENCE, budget=3,
        hint="read the exception, or the log of the named node",
    ),
    _F.HOST_OOM: Treatment(
        evidence="the kernel's or cgroup's out-of-memory record",
        ladder=(_L1,), budget=2,
        hint="ask for more memory (`slurm.mem`) or use fewer ranks per node",
    ),
    _F.CUDA_OOM: Treatment(
        evidence="the device ran out of memory",
        ladder=(_L1,), budget=1,
        hint="a smaller `tokens.micro_batch_size`, or more tp or pp; `pawl check` shows the memory estimate",
    ),
    _F.NONFINITE: Treatment(
        evidence="exit 86: loss or gradient not finite, all ranks agreed",
        ladder=(_L1,), budget=3,
        hint="look at the loss before it and at the batch; a lower learning rate, or a longer warm-up",
    ),
    _F.LOSS_SPIKE: Treatment(
        evidence="exit 87: the loss rose beyond the window and stayed",
        ladder=(_L1,), budget=3,
        hint="a lower learning rate, or skip the window",
    ),
    _F.DESYNC: Treatment(
        evidence="exit 91: ranks that must hold the same bits do not; a node that most copies contradict leaves",
        ladder=(_L1, _L2, _L4), exclude=Exclusion.ALWAYS, budget=5,
        hint="a node computes or keeps wrong numbers: have the named one tested, or those of the named ranks",
    ),
    _F.DATA_ERROR: Treatment(
        evidence="exit 88: a shard or record cannot be read",
        ladder=(_L1,), budget=1,
        hint="repair or replace the named file, then resume",
    ),
    _F.CHECKPOINT_INVALID: Treatment(
        evidence="exit 89: the checkpoint failed verification; it is kept aside, the one before is used",
        ladder=(_L1,), budget=None,
        hint="the quarantined checkpoint is kept for inspection; check the storage",
    ),
    _F.STORAGE: Treatment(
        evidence="exit 92; ENOSPC, EIO, ESTALE, EDQUOT",
        ladder=(_L1, _L4), budget=8,
        hint="free space or quota, then resume; `pawl clean` shows what may go",
    ),
    _F.PREEMPTED: Treatment(
        evidence="exit 75 after a notice, or Slurm says PREEMPTED",
        ladder=(_L3, _L4), budget=None, backoff=False,
        hint="nothing to do: it continues in the next attempt",
    ),
    _F.TIME_LIMIT: Treatment(
        evidence="exit 75 after a notice, or Slurm says TIMEOUT",
        ladder=(_L3, _L4), budget=None, backoff=False,
        hint="without a checkpoint inside the limit: a shorter `checkpoints.checkpoint_interval`",
    ),
    _F.START_FAIL: Treatment(
        evidence="rendezvous, port or import failed before the first step of a run that has trained before",
        ladder=(_L1, _L4), budget=3,
        hint="read the log of the named node",
    ),
    _F.CONFIG: Treatment(
        evidence="exit 78, or an ImportError, TypeError, ValueError … before the run's first step",
        ladder=(), budget=0, final=Final.FAILED, backoff=False,
        hint="correct the config or the code, then `pawl resume RUN --set …` or `--code current`",
    ),
    _F.STRAGGLER: Treatment(
        evidence="one node slower than the others for long",
        ladder=(_L2,), budget=None, exclude=Exclusion.ALWAYS,
        hint="look at clocks and temperature of the named node",
    ),
    _F.SLURM_DOWN: Treatment(
        evidence="slurmctld does not answer",
        ladder=(_L4,), budget=None,
        hint="nothing to do: pawl waits for Slurm",
    ),
    _F.CANCELLED: Treatment(
        evidence="Slurm says CANCELLED by a user, and pawl did not ask for it",
        ladder=(), budget=0, backoff=False,
        hint="`pawl resume RUN` when you want it to go on",
    ),
    _F.DO_NOT_RESTART: Treatment(
        evidence="exit 93: the trainer asks not to be restarted",
        ladder=(), budget=0, backoff=False,
        hint="read its message; `pawl resume RUN` when it is settled",
    ),
    _F.UNKNOWN: Treatment(
        evidence="none of the others",
        ladder=(_L1, _L4), budget=2,
        hint="read the log of the named node",
    ),
}  # fmt: skip
