"""What render, submit, resume and controller do."""

import os
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path

import typer

from orchestrator.cli.actions.check import launch_lines
from orchestrator.cli.actions.controller import control, handling_of
from orchestrator.cli.places import runs_folder, the_run
from orchestrator.config.check import CheckResult, run_check
from orchestrator.config.problems import Severity, format_problem
from orchestrator.config.site import find_site
from orchestrator.config.spec import RunSpec
from orchestrator.control.clock import SystemClock
from orchestrator.control.controller import Reconciled, reconcile
from orchestrator.control.launchers import make_launcher
from orchestrator.errors import ConfigProblems, PawlError, UsageError
from orchestrator.slurm.client import find_sbatch
from orchestrator.state import ledger
from orchestrator.state.history import History, replay
from orchestrator.state.provenance import collect_provenance, whoami
from orchestrator.state.records import LaunchFacts
from orchestrator.state.requests import new_ulid
from orchestrator.state.rundir import RunPaths
from orchestrator.submit.facts import retention_of_config
from orchestrator.submit.plan import LaunchPlan, plan_launch
from orchestrator.submit.quoting import REDACTED
from orchestrator.submit.redact import redact
from orchestrator.submit.render import render_batch
from orchestrator.submit.resume import resume as resume_paths
from orchestrator.submit.secrets_file import split_secrets
from orchestrator.submit.space import need_of, space_line
from orchestrator.submit.submit import NewRun, check_place, make_run, run_folder
from orchestrator.submit.templates import PLAIN, SUPERVISED, load_template
from orchestrator.supervise.ports import is_free
from orchestrator.views.records import RunView
from orchestrator.views.run_view import run_view

_PREVIEW_NONCE = "preview"
_ENDING_S = 60.0
# Rules of the controller that wait until a person has looked.
_NOTHING_LAUNCHED = ("run-dir-unreadable", "attempt-unknown")
_ORCHESTRATOR_KEYS = ("slurm", "recovery", "monitoring", "launcher", "notify")


def render_script(
    config: Path, *, overrides: tuple[str, ...], plain: bool, runs_root: Path | None, site: Path | None
) -> str:
    """The batch script of a first attempt, as text."""
    site_path = find_site(site)
    result = run_check(config, overrides=overrides, site=site_path)
    spec, facts = _require(result)
    foreign = [text for text in overrides if text.split("=")[0].split(".")[0] not in _ORCHESTRATOR_KEYS]
    if plain and foreign:
        raise UsageError(
            f"--set {foreign[0]} cannot go into a plain job: there the trainer reads {config} itself. Put the value "
            "into the file."
        )
    folder = run_folder(runs_folder(runs_root, site=site), facts.run)
    plan = plan_launch(
        spec,
        facts,
        run_dir=folder,
        attempt=1,
        nonce=_PREVIEW_NONCE,
        python=sys.executable,
        workdir=os.getcwd(),
        plain=plain,
        config=os.path.abspath(config) if plain else "run.yaml",
    )
    if plain and plan.secrets_file:
        typer.echo(f"pawl: the script reads secret variables from {folder / plan.secrets_file} (mode 0600).", err=True)
    return render_batch(plan, load_template(PLAIN if plain else SUPERVISED))


def submit_config(
    config: Path,
    *,
    launcher: str | None,
    overrides: tuple[str, ...],
    dry_run: bool,
    watching: bool,
    runs_root: Path | None,
    site: Path | None,
) -> int:
    """Check, make the run directory, launch the first attempt. Nothing is written before everything is checked."""
    if launcher is not None:
        make_launcher(launcher)
        overrides = (*overrides, f"launcher.kind={launcher}")
    result = run_check(config, overrides=overrides, site=find_site(site), here=True)
    spec, _ = _require(result)
    _say_warnings(result)
    root = runs_folder(runs_root, site=site)
    run = _new_run(result, config=config, overrides=overrides)
    folder = check_place(root, run)
    plan = _first_plan(spec, run, folder)
    script = render_batch(plan, load_template(SUPERVISED)) if spec.launcher.kind == "slurm" else None
    if dry_run:
        return _show(plan, spec, script, folder, run)
    check_tools(spec)
    return start(make_run(root, run, writer=f"cli-{new_ulid()}"), watching=watching)


def start(paths: RunPaths, *, watching: bool) -> int:
    """Launch a run that was just made, say where to look, and watch it if asked."""
    _launch(paths)
    for line in where_to_look(paths.root):
        typer.echo(line)
    if not watching:
        return 0
    from orchestrator.cli.actions.look import watch_directory

    return watch_directory(paths.root)


def where_to_look(folder: Path) -> tuple[str, ...]:
    """What a person does after a submit."""
    name = shlex.quote(folder.name)
    return (
        f"Run {folder.name} is on its way: {folder}",
        f"  pawl watch {name}     live        pawl status {name}    once        pawl logs {name} -f    output",
        f"  pawl drain {name}     checkpoint and stop           pawl explain {name}   what happened and why",
    )


def _require(result: CheckResult) -> tuple[RunSpec, LaunchFacts]:
    """Spec and facts of a config without errors; the message of ConfigProblems holds no secret."""
    shown = redact(result)
    if not result.ok:
        shown.require()
    return result.require()


def _say_warnings(result: CheckResult) -> None:
    for problem in redact(result).problems:
        if problem.severity is Severity.WARNING:
            typer.echo(format_problem(problem), err=True)


def _new_run(result: CheckResult, *, config: Path, overrides: tuple[str, ...]) -> NewRun:
    spec, facts = result.require()
    _, secret = split_secrets(spec.slurm.env)
    blank = [name for name, value in secret.items() if value == REDACTED]
    if blank:
        raise ConfigProblems(f"slurm.env.{blank[0]}: its value is {REDACTED}, a blanked secret. Give the value itself.")
    now = time.time()
    return NewRun(
        facts=facts,
        config_text=redact(result).merged_yaml,
        secret_env=secret,
        provenance=collect_provenance(config_path=config, overrides=overrides, workdir=Path(os.getcwd()), now_unix=now),
        run_created={
            "run": facts.run,
            "world_size": facts.world_size,
            "nodes": spec.num_nodes,
            "spares": spec.recovery.spares,
            "launcher": spec.launcher.kind,
            "by": whoami(),
        },
        retention=retention_of_config(result.config),
    )


def _first_plan(spec: RunSpec, run: NewRun, folder: Path) -> LaunchPlan:
    """The plan of attempt 1, made before anything is written so that what it refuses leaves no trace."""
    return plan_launch(
        spec,
        run.facts,
        run_dir=folder,
        attempt=1,
        nonce=_PREVIEW_NONCE,
        python=sys.executable,
        workdir=os.getcwd(),
        launcher=spec.launcher.kind,
    )


def check_tools(spec: RunSpec) -> None:
    """What the launcher needs on this machine. Raises SlurmUnreachable or PawlError."""
    if spec.launcher.kind == "slurm":
        find_sbatch(os.environ)
        return
    port = spec.monitoring.agent_port
    if port and not is_free(port):
        raise PawlError(
            f"monitoring.agent_port: port {port} is in use on this machine. Give another one, or 0 to take a free one."
        )


def _show(plan: LaunchPlan, spec: RunSpec, script: str | None, folder: Path, run: NewRun) -> int:
    """The dry run: what would be made and started."""
    typer.echo(f"Would make {folder} and start attempt 1:")
    for line in launch_lines(spec):
        typer.echo(f"  {line}")
    typer.echo(f"  {space_line(folder, need_of(run.facts, run.retention))}")
    typer.echo("")
    typer.echo(script if script is not None else shlex.join([*plan.supervise, *plan.torchrun]))
    return 0


def _launch(paths: RunPaths) -> Reconciled:
    """Reconcile once the world says so: the same call that relaunches. The run stays when launching fails."""
    how = handling_of(paths)
    try:
        return reconcile(paths, launcher=how.launcher, policy=how.policy, clock=SystemClock(), by=whoami())
    except PawlError as error:
        name = paths.root.name
        raise type(error)(
            f"{error} The run directory {paths.root} stays; go on with `pawl resume {name}` (--set changes values)."
        ) from error


def resume_run(
    run: str, *, overrides: tuple[str, ...], why: str, code: str | None, from_start: bool, runs_root: Path | None,
    site: Path | None,
) -> int:  # fmt: skip
    """Record the change and launch again."""
    if code not in (None, "current"):
        raise UsageError(f"--code {code[:40]!r}: pawl keeps no older code to go back to; the one value is `current`.")
    paths, renews = the_run(run, runs_root=runs_root, site=site), code is not None
    said = resume_paths(
        paths, overrides=overrides, why=why, by=whoami(), now_unix=time.time(), code_current=renews,
        from_start=from_start,
    )  # fmt: skip
    for line in said:
        typer.echo(line)
    for line in goes_on_from(replace(run_view(paths.root), run=paths.root.name), replay(ledger.read_all(paths.root))):
        typer.echo(line)
    result = _launch_after(paths, wait_s=_ENDING_S)
    if result.decision is not None and result.decision.rule in _NOTHING_LAUNCHED:
        raise PawlError(
            f"{paths.root.name} may go on, but nothing was launched: {result.done}. When that is settled, "
            "`pawl controller --once` launches it."
        )
    typer.echo(f"{paths.root.name}: {result.done}.")
    return 0


def goes_on_from(view: RunView, history: History) -> tuple[str, ...]:
    """Where a resumed run starts, and the newer checkpoints that do not count, with the reason. Pure."""
    newest = view.newest_checkpoint
    bad = [item for item in view.checkpoints if not item.counts and (newest is None or item.step > newest.step)]
    start = f"from {newest.name}" if newest is not None else "from the beginning"
    passed = (f"Passed over {item.name}, which does not count: {item.why_not}" for item in bad)
    if newest is None and history.best_step and not history.may_start_over:
        return (
            f"{view.run} had a checkpoint of step {history.best_step}, and none that counts is left here. It goes on "
            f"from the newest copy if there is one, else it is HELD: pawl resume {view.run} --from-start begins again.",
            *passed,
        )
    return (f"{view.run} goes on {start}.", *passed)


def _launch_after(paths: RunPaths, *, wait_s: float) -> Reconciled:
    """Launch, waiting for the attempt before to end: its last processes may outlive the answer to a drain."""
    deadline = time.monotonic() + wait_s
    while True:
        result = _launch(paths)
        ending = result.decision is not None and result.decision.rule == "attempt-alive"
        if not ending or time.monotonic() >= deadline:
            return result
        time.sleep(0.5)


def run_controller(
    *, once: bool, observe: bool, metrics_port: int | None, runs_root: Path | None, site: Path | None
) -> int:
    """Reconcile all runs, once or for ever."""
    return control(runs_folder(runs_root, site=site), once=once, observe=observe, metrics_port=metrics_port)
