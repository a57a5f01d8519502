"""The two ways to start an attempt: a Slurm job, or a supervisor process on this machine. One plan serves both.

prepare_attempt: frozen config ─▶ LaunchPlan ─▶ attempts/N/plan.json (+ job.sbatch)
SlurmLauncher:   sbatch job.sbatch                LocalLauncher: python -m orchestrator supervise …
"""

import json
import sys
from dataclasses import dataclass, field

from orchestrator.control.act import Launched, Launcher
from orchestrator.control.observe import local_liveness
from orchestrator.decide.observation import Liveness
from orchestrator.errors import PawlError, UsageError
from orchestrator.slurm.client import CliSlurm, SlurmClient
from orchestrator.state.fsio import read_text, write_atomic
from orchestrator.state.records import Claim, Intent
from orchestrator.state.rundir import RunPaths
from orchestrator.submit.facts import read_frozen
from orchestrator.submit.plan import LaunchPlan, plan_launch
from orchestrator.submit.render import render_batch
from orchestrator.submit.secrets_file import read_secrets
from orchestrator.submit.templates import SUPERVISED, load_template

PLAN_FILE = "plan.json"
KINDS = ("slurm", "local")


def prepare_attempt(
    paths: RunPaths, *, attempt: int, nonce: str, launcher: str, exclude: tuple[str, ...] = ()
) -> LaunchPlan:
    """Plan an attempt from what the run directory holds and write plan.json, for Slurm job.sbatch as well.

    Raises UsageError for what cannot be launched as configured, PawlError for an unreadable run directory, OSError.
    """
    frozen = read_frozen(paths)
    plan = plan_launch(
        frozen.spec,
        frozen.facts,
        run_dir=paths.root,
        attempt=attempt,
        nonce=nonce,
        python=sys.executable,
        workdir=work_folder(paths),
        launcher=launcher,
        exclude=exclude,
        config=frozen.config,
        retention=frozen.retention,
        copies=frozen.copies,
    )
    if launcher == "slurm":
        write_atomic(paths.job_script(attempt), render_batch(plan, load_template(SUPERVISED)), mode=0o750)
    text = json.dumps(plan.to_json(), indent=2, ensure_ascii=False) + "\n"
    write_atomic(paths.attempt(attempt) / PLAN_FILE, text)
    return plan


def work_folder(paths: RunPaths) -> str:
    """The folder that relative paths of the config mean: where the run was submitted.

    Raises PawlError when the provenance that says so is gone.
    """
    try:
        return str(json.loads(read_text(paths.provenance) or "")["workdir"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PawlError(
            f"{paths.provenance} does not say where the run was submitted, so relative paths of its config have no "
            "meaning. Restore the file."
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmLauncher:
    """Hands the batch script of an attempt to sbatch."""

    client: SlurmClient = field(default_factory=CliSlurm)
    kind: str = "slurm"

    def liveness(self, intent: Intent | None, claim: Claim | None) -> tuple[Liveness, str]:
        """What is known without asking Slurm: a job that may sit in the queue is never taken for dead."""
        if intent is None:
            return Liveness.PENDING, "its intent is not written yet"
        if claim is None:
            return Liveness.UNKNOWN, "its job has not begun; it may wait in Slurm's queue"
        if claim.nonce != intent.nonce:
            return Liveness.DEAD, "it was abandoned before it began"
        return Liveness.UNKNOWN, f"it began on {claim.host} (job {claim.job_id}); its own ledger says when it ends"

    def launch(self, *, paths: RunPaths, attempt: int, nonce: str, exclude: tuple[str, ...]) -> Launched:
        prepare_attempt(paths, attempt=attempt, nonce=nonce, launcher=self.kind, exclude=exclude)
        return Launched(job_id=str(self.client.submit(paths.job_script(attempt))))


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLauncher:
    """Starts the supervisor here; its nodes are process trees of this machine."""

    kind: str = "local"

    def liveness(self, intent: Intent | None, claim: Claim | None) -> tuple[Liveness, str]:
        return local_liveness(intent, claim)

    def launch(self, *, paths: RunPaths, attempt: int, nonce: str, exclude: tuple[str, ...]) -> Launched:
        from orchestrator.control import launch_local

        plan = prepare_attempt(paths, attempt=attempt, nonce=nonce, launcher=self.kind, exclude=exclude)
        return Launched(pid=launch_local.start_attempt(paths, plan.to_json(), env=read_secrets(paths.root)))


def make_launcher(kind: str) -> Launcher:
    """The launcher by its name. Raises UsageError for another word."""
    match kind:
        case "slurm":
            return SlurmLauncher()
        case "local":
            return LocalLauncher()
        case _:
            raise UsageError(f"There is no launcher {kind[:40]!r}. Use one of: {', '.join(KINDS)}.")
