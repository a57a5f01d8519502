"""What one attempt of a run will be, as data: the Slurm job, its environment, the commands it runs; pure.

    RunSpec + LaunchFacts + where + which attempt ─▶ plan_launch ─▶ LaunchPlan ─▶ render (batch script)
                                                                          └─────▶ plan.json (supervisor, local launcher)

A plan is independent of the job id: the same script can be submitted by hand, twice, or on another day. Training
nodes and hot spares are asked for together; which of them train is the supervisor's choice, cycle by cycle. The
torchrun command therefore stands here with placeholders that each node's agent fills in.

Names: the job is called `slurm.job_name` where that is set, else `general.run`; SBATCH_JOB_NAME and the other SBATCH_*
variables of the caller are scrubbed at submission, so the name shown is the one Slurm has.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orchestrator.config.secret_names import is_secret
from orchestrator.config.spec import PhaseLimitSpec, RecoverySpec, RunSpec, SlurmSpec
from orchestrator.decide.policy import DEFAULT_LIMITS, PhaseLimit
from orchestrator.errors import UsageError
from orchestrator.state.copies import Copies
from orchestrator.state.records import LaunchFacts
from orchestrator.state.retention import Retention
from orchestrator.submit.quoting import check_text, check_variable
from orchestrator.words import plural

PLACEHOLDERS = (
    *("{nnodes}", "{node_rank}", "{ranks_per_node}", "{master_addr}", "{master_port}"),
    *("{cycle_file}", "{shm}"),
)
SECRETS_FILE = "secrets/env"
DEFAULT_LEAD_S = 120
# Flags that pawl decides: retry has one owner, the environment is clean, the nonce finds the job again.
_OWNED_FLAGS = frozenset(
    {
        "array", "chdir", "comment", "dependency", "export", "export-file", "input", "job-name", "kill-on-invalid-dep",
        "no-kill", "no-requeue", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output", "error", "parsable",
        "requeue", "signal", "test-only", "uid", "gid", "wait", "wrap",
    }
)  # fmt: skip
_EXTRA = re.compile(r"--(?P<flag>[a-z][a-z0-9-]*)(?:=(?P<value>.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive:
    """One `#SBATCH --flag=value` line and the config key it came from (for messages)."""

    flag: str
    value: str | None = None
    key: str

    @property
    def argument(self) -> str:
        """As one argument of a command line, unquoted."""
        return f"--{self.flag}" if self.value is None else f"--{self.flag}={self.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """An environment variable of the job, never a secret one, and the config key it came from."""

    name: str
    value: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """One attempt, ready to be rendered or started. `torchrun` holds PLACEHOLDERS, `plain_torchrun` none.

    num_nodes counts training nodes, num_spares the hot spares beside them. secrets_file is relative to run_dir.
    """

    run: str
    attempt: int
    nonce: str
    launcher: str
    run_dir: str
    workdir: str
    config: str
    python: str
    job_name: str
    num_nodes: int
    num_spares: int
    ranks_per_node: int
    world_size: int
    cpus_per_task: int | None
    directives: tuple[Directive, ...]
    prologue: tuple[str, ...]
    env: tuple[Setting, ...]
    secrets_file: str | None
    supervise: tuple[str, ...]
    torchrun: tuple[str, ...]
    plain_torchrun: tuple[str, ...]
    recovery: dict[str, Any]
    monitoring: dict[str, Any]
    retention: Retention
    copies: Copies

    def to_json(self) -> dict[str, Any]:
        """The content of plan.json: what the supervisor and the local launcher need besides run.yaml."""
        return {
            "schema_version": 1,
            "run": self.run,
            "attempt": self.attempt,
            "nonce": self.nonce,
            "launcher": self.launcher,
            "config": self.config,
            "workdir": self.workdir,
            "python": self.python,
            "num_nodes": self.num_nodes,
            "num_spares": self.num_spares,
            "ranks_per_node": self.ranks_per_node,
            "world_size": self.world_size,
            "cpus_per_task": self.cpus_per_task,
            "env": {setting.name: setting.value for setting in self.env},
            "secrets_file": self.secrets_file,
            "supervise": list(self.supervise),
            "torchrun": list(self.torchrun),
            "recovery": self.recovery,
            "monitoring": self.monitoring,
            "checkpoints": {**asdict(self.retention), **asdict(self.copies)},
        }


def plan_launch(
    spec: RunSpec,
    facts: LaunchFacts,
    *,
    run_dir: Path,
    attempt: int,
    nonce: str,
    python: str,
    workdir: str,
    launcher: str = "slurm",
    exclude: tuple[str, ...] = (),
    lead_s: int | None = None,
    plain: bool = False,
    config: str = "run.yaml",
    retention: Retention | None = None,
    copies: Copies | None = None,
) -> LaunchPlan:
    """The plan of attempt `attempt`; absolute `run_dir` and `python`. `lead_s`: a learned warning time.

    `config` is the run's current YAML relative to run_dir (a revision after `pawl resume --set`).
    `plain` asks for the classical job without supervisor: no spares, no signal, Slurm kills it as a whole.
    Raises UsageError naming the key of whatever cannot be launched as asked.
    """
    _check_sizes(spec, facts)
    _check_paths({"the run directory": str(run_dir), "the Python in use": python, "the work folder": workdir})
    supervise = (
        *(python, "-m", "orchestrator", "supervise", "--run-dir", str(run_dir)),
        *("--attempt", str(attempt), "--launcher", launcher, "--"),
    )
    return LaunchPlan(
        run=facts.run,
        attempt=attempt,
        nonce=nonce,
        launcher=launcher,
        run_dir=str(run_dir),
        workdir=workdir,
        config=config,
        python=python,
        job_name=spec.slurm.job_name or facts.run,
        num_nodes=spec.num_nodes,
        num_spares=0 if plain else spec.recovery.spares,
        ranks_per_node=spec.ranks_per_node,
        world_size=facts.world_size,
        cpus_per_task=spec.slurm.cpus_per_task,
        directives=_directives(
            spec, facts, run_dir=run_dir, workdir=workdir, attempt=attempt, nonce=nonce, exclude=exclude, lead_s=lead_s,
            plain=plain,
        ),
        prologue=_prologue(spec.slurm),
        env=_settings(spec, nonce=None if plain else nonce),
        secrets_file=SECRETS_FILE if any(is_secret(name) for name in spec.slurm.env) else None,
        supervise=supervise,
        torchrun=_torchrun(run_dir=run_dir, python=python, config=config),
        plain_torchrun=_plain_torchrun(spec, run_dir=run_dir, python=python, config=config),
        recovery=_recovery(spec.recovery),
        monitoring=spec.monitoring.model_dump(mode="json"),
        retention=retention or Retention(),
        copies=copies or Copies(),
    )  # fmt: skip


def _check_paths(paths: dict[str, str]) -> None:
    """A path must pass through a script in one line, and through the agents' replacement of placeholders unchanged."""
    for key, text in paths.items():
        check_text(text, key=key)
        if any(placeholder in text for placeholder in PLACEHOLDERS):
            raise UsageError(f"{key}: {text!r} contains a placeholder such as {{shm}}; choose another path.")


def _check_sizes(spec: RunSpec, facts: LaunchFacts) -> None:
    """Nodes × ranks per node must be the mesh: the shell would otherwise wait for ranks that never come."""
    if spec.num_nodes * spec.ranks_per_node != facts.world_size:
        raise UsageError(
            f"slurm.nodes {spec.num_nodes} × slurm.ranks_per_node {spec.ranks_per_node} = "
            f"{plural(spec.num_nodes * spec.ranks_per_node, 'rank')}, but parallelism dp {facts.dp} × pp {facts.pp} × "
            f"tp {facts.tp} × cp {facts.cp} = {plural(facts.world_size, 'rank')}. Make them equal."
        )


def _torchrun(*, run_dir: Path, python: str, config: str) -> tuple[str, ...]:
    return (
        str(Path(python).parent / "torchrun"),
        *("--nnodes={nnodes}", "--node-rank={node_rank}", "--nproc-per-node={ranks_per_node}"),
        *("--master-addr={master_addr}", "--master-port={master_port}", "--max-restarts=0"),
        # Labels what each rank writes, then becomes the command behind it.
        *("-m", "orchestrator.agent.label"),
        *("-m", "trainer", "train", "--config-file", str(run_dir / config), "--run-dir", str(run_dir)),
        *("--cycle", "{cycle_file}", "--shm", "{shm}"),
    )


def _plain_torchrun(spec: RunSpec, *, run_dir: Path, python: str, config: str) -> tuple[str, ...]:
    """Without node rank, head and port, which each task adds from its own environment."""
    return (
        str(Path(python).parent / "torchrun"),
        *(f"--nnodes={spec.num_nodes}", f"--nproc-per-node={spec.ranks_per_node}", "--max-restarts=0"),
        *("-m", "trainer", "train", "--config-file", str(run_dir / config), "--run-dir", str(run_dir)),
    )


def _directives(
    spec: RunSpec,
    facts: LaunchFacts,
    *,
    run_dir: Path,
    workdir: str,
    attempt: int,
    nonce: str,
    exclude: tuple[str, ...],
    lead_s: int | None,
    plain: bool,
) -> tuple[Directive, ...]:
    slurm = spec.slurm
    spares = 0 if plain else spec.recovery.spares
    # Nobody makes the folders of a plain job, and Slurm loses a job whose output folder does not exist.
    log = f"{workdir}/slurm-%j.log" if plain else f"{run_dir}/attempts/{attempt:04d}/slurm-%j.log"
    lead = slurm.signal_lead_s or lead_s or DEFAULT_LEAD_S
    rows: list[tuple[str, str | int | bool | None, str]] = [
        ("job-name", slurm.job_name or facts.run, "slurm.job_name" if slurm.job_name else "general.run"),
        ("nodes", spec.num_nodes + spares, "slurm.nodes"),
        ("ntasks-per-node", 1, "slurm.nodes"),
        ("partition", slurm.partition, "slurm.partition"),
        ("account", slurm.account, "slurm.account"),
        ("qos", slurm.qos, "slurm.qos"),
        ("time", slurm.time, "slurm.time"),
        ("constraint", slurm.constraint, "slurm.constraint"),
        ("reservation", slurm.reservation, "slurm.reservation"),
        _gpu_row(spec, num_nodes=spec.num_nodes + spares),
        ("cpus-per-task", slurm.cpus_per_task, "slurm.cpus_per_task"),
        ("mem", slurm.mem, "slurm.mem"),
        ("exclusive", slurm.exclusive, "slurm.exclusive"),
        ("nodelist", slurm.nodelist, "slurm.nodelist"),
        ("exclude", ",".join([*filter(None, [slurm.exclude]), *exclude]) or None, "slurm.exclude"),
        ("no-requeue", True, "slurm"),
        ("no-kill", not plain, "slurm"),
        ("signal", None if plain else f"B:USR2@{lead}", "slurm.signal_lead_s"),
        ("open-mode", "append", "slurm"),
        ("export", "NONE", "slurm"),
        ("comment", f"pawl {nonce}", "slurm"),
        ("chdir", workdir, "the work folder"),
        # % starts a pattern in --output only; a folder may have it in its name.
        ("output", slurm.output or _escape_pattern(log), "slurm.output" if slurm.output else "the log file"),
    ]
    own = tuple(
        Directive(flag=flag, value=None if value is True else str(value), key=key)
        for flag, value, key in rows
        if value is not None and value is not False
    )
    return own + _extras(slurm.extra, own)


def _escape_pattern(path: str) -> str:
    head, _, name = path.rpartition("/")
    return f"{head.replace('%', '%%')}/{name}"


def _gpu_row(spec: RunSpec, *, num_nodes: int) -> tuple[str, str | None, str]:
    """Sites accept different spellings of "all GPUs of the node", so the form is the site's choice."""
    count = spec.ranks_per_node if not spec.slurm.gpu_type else f"{spec.slurm.gpu_type}:{spec.ranks_per_node}"
    match str(spec.slurm.gpu_request):
        case "gpus-per-node":
            return ("gpus-per-node", str(count), "slurm.gpu_request")
        case "gres":
            return ("gres", f"gpu:{count}", "slurm.gpu_request")
        case "gpus":
            total = spec.ranks_per_node * num_nodes
            return (
                "gpus",
                f"{spec.slurm.gpu_type}:{total}" if spec.slurm.gpu_type else str(total),
                "slurm.gpu_request",
            )
        case _:
            return ("gpus-per-node", None, "slurm.gpu_request")


def _extras(arguments: Sequence[str], own: tuple[Directive, ...]) -> tuple[Directive, ...]:
    """The config's own options. sbatch would let the last of two speakers win, so each flag is said once."""
    said = {directive.flag: directive.key for directive in own}
    extra = tuple(_extra(argument, index) for index, argument in enumerate(arguments))
    for directive in extra:
        if directive.flag in said:
            raise UsageError(f"{directive.key}: --{directive.flag} is given by {said[directive.flag]} already.")
        said[directive.flag] = directive.key
    return extra


def _extra(argument: str, index: int) -> Directive:
    key = f"slurm.extra[{index}]"
    match = _EXTRA.fullmatch(argument)
    if match is None:
        raise UsageError(f"{key}: {argument[:80]!r} is no sbatch option. Write it as --flag or --flag=value.")
    if match["flag"] in _OWNED_FLAGS:
        raise UsageError(f"{key}: --{match['flag']} is set by pawl itself and cannot be given as an extra option.")
    return Directive(flag=match["flag"], value=match["value"], key=key)


def _prologue(slurm: SlurmSpec) -> tuple[str, ...]:
    """The user's set-up lines. They are shell by declaration; a directive among them would be ignored by sbatch."""
    lines = tuple((slurm.prologue or "").rstrip("\n").split("\n")) if slurm.prologue else ()
    for number, line in enumerate(lines, start=1):
        check_text(line.replace("\t", " "), key=f"slurm.prologue line {number}")
        if line.lstrip().startswith("#SBATCH"):
            raise UsageError(
                f"slurm.prologue line {number}: {line.strip()[:80]!r} stands after commands, where sbatch ignores it. "
                "Set the matching key under `slurm:`, or add it to slurm.extra."
            )
    return lines


def _settings(spec: RunSpec, *, nonce: str | None) -> tuple[Setting, ...]:
    """The job's variables: pawl's defaults, then the config's, names letter for letter; secret ones are left out."""
    own = {"PYTHONSAFEPATH": "1"}  # user code comes by model.python_path, never by the folder a job starts in
    if nonce is not None:
        own["PAWL_NONCE"] = nonce
    threads = spec.launcher.threads_per_rank or (spec.slurm.cpus_per_task or 0) // spec.ranks_per_node
    if threads:
        own["OMP_NUM_THREADS"] = str(threads)
    if spec.launcher.network_interface:
        own |= dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), spec.launcher.network_interface)
    settings = [Setting(name=name, value=value, key="launcher") for name, value in own.items()]
    for name, value in spec.slurm.env.items():
        check_variable(name, key="slurm.env")
        if not is_secret(name):
            text = check_text(value, key=f"slurm.env.{name}")
            settings.append(Setting(name=name, value=text, key=f"slurm.env.{name}"))
    return tuple(settings)


def _recovery(spec: RecoverySpec) -> dict[str, Any]:
    """The section as plain data, with every phase limit whole: those inside the job read no defaults of ours."""
    data = spec.model_dump(mode="json", exclude={"phase_limits"})
    given = {phase: getattr(spec.phase_limits, phase) for phase in DEFAULT_LIMITS}
    return data | {"phase_limits": {phase: _limit(given[phase], base) for phase, base in DEFAULT_LIMITS.items()}}


def _limit(given: PhaseLimitSpec | None, base: PhaseLimit) -> dict[str, float]:
    values = {} if given is None else given.model_dump(exclude_none=True)
    return {name: float(values.get(name, getattr(base, name))) for name in ("floor_s", "factor", "ceiling_s")}
