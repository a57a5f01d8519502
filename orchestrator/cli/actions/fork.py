"""What `pawl fork` does: check, make the new run whole, start it."""

from pathlib import Path

import typer

from orchestrator.cli.actions.check import launch_lines
from orchestrator.cli.actions.launch import check_tools, start
from orchestrator.cli.places import runs_folder, the_run
from orchestrator.config.problems import Severity, format_problem
from orchestrator.control.launchers import make_launcher
from orchestrator.control.shelf import choose, read_shelf
from orchestrator.errors import UsageError
from orchestrator.state.provenance import whoami
from orchestrator.state.requests import new_ulid
from orchestrator.state.run_at import parse_run_at
from orchestrator.submit.fork import BASE, Fork, Wish, filler, plan_fork
from orchestrator.submit.redact import redact
from orchestrator.submit.space import need_of, space_line
from orchestrator.submit.submit import check_place, make_run


def fork_run(
    source: str,
    *,
    new: str,
    overrides: tuple[str, ...],
    weights_only: bool,
    why: str,
    launcher: str | None,
    starts: bool,
    dry_run: bool,
    watching: bool,
    runs_root: Path | None,
    site: Path | None,
) -> int:
    """Make the run and start it. Nothing is left of a fork that failed."""
    if watching and not starts:
        raise UsageError("--watch and --no-start exclude each other: a run that is not started shows nothing.")
    if launcher is not None:
        make_launcher(launcher)
        overrides = (*overrides, f"launcher.kind={launcher}")
    at, root = parse_run_at(source), runs_folder(runs_root, site=site)
    shelf = read_shelf(the_run(at.run, runs_root=runs_root, site=site))
    wish = Wish(run=new, overrides=overrides, weights_only=weights_only, why=why, by=whoami())
    fork = plan_fork(shelf, choose(shelf, at), wish, runs_root=root)
    check_place(root, fork.new)
    for problem in redact(fork.result).problems:
        if problem.severity is Severity.WARNING:
            typer.echo(format_problem(problem), err=True)
    if dry_run:
        return show(fork)
    if starts:
        check_tools(fork.result.require()[0])
    fill = filler(fork, say=typer.echo, held=not starts)
    paths = make_run(root, fork.new, writer=f"cli-{new_ulid()}", fill=fill)
    if starts:
        return start(paths, watching=watching)
    typer.echo(f"Made {paths.root}; nothing was started. Start it with: pawl resume {new}")
    return 0


def show(fork: Fork) -> int:
    """The dry run: what would be made and started."""
    spec, facts = fork.result.require()
    place = f"{BASE}/" if fork.wish.weights_only else "checkpoints/"
    begin = "step 0, with the weights of" if fork.wish.weights_only else f"step {fork.item.step}, from"
    typer.echo(f"Would make {fork.folder} and start it at {begin} {fork.source.run}@{fork.item.entry}:")
    typer.echo(f"  {fork.item.entry} linked or copied into {place}, to step {facts.train_steps:,}")
    for line in launch_lines(spec):
        typer.echo(f"  {line}")
    typer.echo(f"  {space_line(fork.folder, need_of(facts, fork.new.retention))}")
    return 0
