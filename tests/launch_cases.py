"""Plans for tests: one run of 2 × 4 ranks and a hot spare, changed as a test needs it."""

from pathlib import Path
from typing import Any

from orchestrator.config.spec import LauncherSpec, MonitoringSpec, NotifySpec, RecoverySpec, RunSpec, SlurmSpec
from orchestrator.state.records import LaunchFacts, MemoryPerRank
from orchestrator.submit.plan import LaunchPlan, plan_launch

NONCE = "0123456789abcdef"
EVERYTHING: dict[str, Any] = {
    "partition": "gpu,debug",
    "account": "proj-7",
    "qos": "normal",
    "time": "2-00:00:00",
    "constraint": "h100&ib",
    "reservation": "march",
    "gpu_request": "gres",
    "gpu_type": "h100",
    "cpus_per_task": 64,
    "mem": "0",
    "nodelist": "gpu[01-03]",
    "exclude": "gpu09",
    "signal_lead_s": 300,
    "job_name": "my name",
    "extra": ["--switches=1@00:10:00", "--spread-job"],
    "prologue": "module purge\nmodule load cuda/12.6\n\tulimit -l unlimited",
    "env": {"NCCL_DEBUG": "INFO", "http_proxy": "http://proxy:3128", "HF_TOKEN": "hf_secret"},
}


def make_facts(*, run: str = "demo", dp: int = 2, pp: int = 2, tp: int = 2) -> LaunchFacts:
    memory = MemoryPerRank(parameters=1, gradients=2, optimizer=3, activations=4, logits=5, total=15)
    return LaunchFacts(
        run=run, project="p", world_size=dp * pp * tp, dp=dp, pp=pp, tp=tp, cp=1, tokens_per_step=4096,
        samples_per_step=32, sequence_length=128, train_steps=100, checkpoint_interval=10, checkpoint_bytes=1_000_000,
        num_params=1_000_000, flops_per_step=1e9, flops_per_step_full_attn=1e9, flops_per_step_megatron=1e9,
        memory_per_rank_bytes=memory, compute_dtype="float32", config_digest="00", vocab_size=1024,
    )  # fmt: skip


def make_plan(
    *,
    slurm: dict[str, Any] | None = None,
    run: str = "demo",
    run_dir: Path = Path("/scratch/runs/demo"),
    python: str = "/opt/pawl/bin/python",
    attempt: int = 3,
    plain: bool = False,
    exclude: tuple[str, ...] = (),
    lead_s: int | None = None,
    facts: LaunchFacts | None = None,
) -> LaunchPlan:
    return plan_launch(
        make_spec(slurm=slurm or {}),
        facts or make_facts(run=run),
        run_dir=run_dir,
        attempt=attempt,
        nonce=NONCE,
        python=python,
        workdir="/home/me/work",
        plain=plain,
        exclude=exclude,
        lead_s=lead_s,
    )


def make_spec(*, slurm: dict[str, Any], spares: int = 1) -> RunSpec:
    return RunSpec(
        slurm=SlurmSpec(**slurm),
        recovery=RecoverySpec(spares=spares),
        monitoring=MonitoringSpec(),
        launcher=LauncherSpec(),
        notify=NotifySpec(),
        num_nodes=2,
        ranks_per_node=4,
    )
