"""The orchestrator's sections of a config, typed: slurm, recovery, monitoring, launcher, notify.

    slurm       what is asked of Slurm, and what stands around the launch (environment, set-up lines)
    recovery    spares, patience and budgets
    monitoring  where metrics are served        launcher  Slurm or this machine        notify  whom to tell

`slurm.nodes` counts training nodes; the job asks for `slurm.nodes + recovery.spares`. Sizes that follow from the world
size are filled in by `resolve` in `launch_rules.py`.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from orchestrator.decide.policy import PHASES
from orchestrator.words import plural

Count = Annotated[int, Field(ge=1, le=1_000_000)]
Seconds = Annotated[float, Field(gt=0, le=31_536_000)]
Text = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """Base of all sections: values of exactly the stated type, no unknown keys, never changed after reading."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class SlurmSpec(Section):
    """The job. `extra` are further sbatch options (--flag=value); `prologue` is shell by declaration, run as it is."""

    nodes: Count | None = None
    ranks_per_node: Count | None = None
    partition: Text | None = None
    account: Text | None = None
    qos: Text | None = None
    time: Text | None = None
    constraint: Text | None = None
    reservation: Text | None = None
    gpu_request: Literal["gpus-per-node", "gres", "gpus", "none"] = "gpus-per-node"
    gpu_type: Text | None = None
    cpus_per_task: Count | None = None
    mem: Text | None = None
    exclusive: bool = True
    nodelist: Text | None = None
    exclude: Text | None = None
    signal_lead_s: Annotated[int, Field(ge=1, le=65535)] | None = None
    job_name: Text | None = None
    output: Text | None = None
    extra: list[str] = []
    prologue: str | None = None
    container: Literal["none"] | None = None
    env: dict[str, str] = {}


class PhaseLimitSpec(Section):
    """Patience with one phase: p99 · factor, between floor and ceiling; a missing key keeps its default."""

    floor_s: Seconds | None = None
    factor: Annotated[float, Field(ge=1, le=1000)] | None = None
    ceiling_s: Seconds | None = None

    @model_validator(mode="after")
    def _floor_below_ceiling(self) -> "PhaseLimitSpec":
        if self.floor_s is not None and self.ceiling_s is not None and self.floor_s > self.ceiling_s:
            raise ValueError(f"floor_s {self.floor_s:g} is above ceiling_s {self.ceiling_s:g}")
        return self


class PhaseLimitsSpec(Section):
    """One limit per phase of a rank."""

    init: PhaseLimitSpec | None = None
    compile: PhaseLimitSpec | None = None
    restore: PhaseLimitSpec | None = None
    step: PhaseLimitSpec | None = None
    eval: PhaseLimitSpec | None = None
    save: PhaseLimitSpec | None = None
    data: PhaseLimitSpec | None = None
    exit: PhaseLimitSpec | None = None


assert tuple(PhaseLimitsSpec.model_fields) == PHASES, "a phase without a key could not be configured"


class RecoverySpec(Section):
    """How patient, how often. Budgets are restarts per failure class without progress."""

    spares: Annotated[int, Field(ge=0, le=10_000)] = 0
    successors: Annotated[int, Field(ge=0, le=10)] = 1
    beat_interval_s: Annotated[float, Field(ge=0.1, le=60)] = 5.0
    silence_intervals: Annotated[int, Field(ge=2, le=100)] = 3
    phase_limits: PhaseLimitsSpec = PhaseLimitsSpec()
    backoff_s: Annotated[list[Annotated[float, Field(ge=0, le=86_400)]], Field(min_length=1)] = [0, 30, 120, 480, 1800]
    max_cycles_without_checkpoint: Count = 5
    budgets: dict[str, Annotated[int, Field(ge=0, le=1000)]] = {}
    start_limit_s: Seconds = 300.0
    supervisor_lost_s: Seconds = 30.0
    exclude_ttl_s: Seconds = 86_400.0


class MonitoringSpec(Section):
    """Where metrics are served: by each node's agent. `agent_port` 0 takes a free port (see metrics/targets.json)."""

    mode: Literal["nodes", "gateway", "textfile"] = "nodes"
    agent_port: Annotated[int, Field(ge=0, le=65535)] = 0


class LauncherSpec(Section):
    """What starts the nodes: a Slurm job, or process trees on this machine."""

    kind: Literal["slurm", "local"] = "slurm"
    threads_per_rank: Count | None = None
    network_interface: Text | None = None


class NotifySpec(Section):
    """A command told about incidents and endings; an argument list, never a shell line."""

    command: list[str] | None = None


SECTIONS: dict[str, type[Section]] = {
    "slurm": SlurmSpec,
    "recovery": RecoverySpec,
    "monitoring": MonitoringSpec,
    "launcher": LauncherSpec,
    "notify": NotifySpec,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """All sections, and the shape of the launch that follows from them and the world size."""

    slurm: SlurmSpec
    recovery: RecoverySpec
    monitoring: MonitoringSpec
    launcher: LauncherSpec
    notify: NotifySpec
    num_nodes: int
    ranks_per_node: int

    @property
    def executed(self) -> tuple[str, ...]:
        """What of the config is run as the user's own code; `check` lists it."""
        lines = len((self.slurm.prologue or "").splitlines())
        prologue = (f"slurm.prologue ({plural(lines, 'line')}, by bash -l before the launch)",) if lines else ()
        command = self.notify.command
        return prologue + ((f"notify.command ({command[0]})",) if command else ())
