"""Commands that only look: status, watch, logs, explain, report. None of them changes a run."""

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import JsonFlag, OptionalRunArgument, RunArgument, RunsRootOption, SiteOption


def status(
    run: OptionalRunArgument = None,
    runs_root: RunsRootOption = None,
    site: SiteOption = None,
    as_json: JsonFlag = False,
) -> None:
    """State of one run, or of all runs.

    Exit code 3 when the run asked for is HELD.

    \b
    pawl status                 one line per run
    pawl status demo            steps, nodes, incidents, budgets
    pawl status demo --json     the same as data
    """
    from orchestrator.cli.actions import look as action

    raise typer.Exit(action.show_status(run, runs_root=runs_root, site=site, as_json=as_json))


def watch(run: OptionalRunArgument = None, runs_root: RunsRootOption = None, site: SiteOption = None) -> None:
    """Live progress of a run; Ctrl-C leaves the run going.

    Ends with the run: exit code 0, 1 when it FAILED, 3 when it is HELD.

    \b
    pawl watch                  the run that was active last
    pawl watch demo
    """
    from orchestrator.cli.actions import look as action

    raise typer.Exit(action.watch_run(run, runs_root=runs_root, site=site))


def logs(
    run: RunArgument,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on printing; Ctrl-C ends it.")] = False,
    rank: Annotated[int | None, typer.Option("--rank", help="Only this rank.", min=0)] = None,
    runs_root: RunsRootOption = None,
    site: SiteOption = None,
) -> None:
    """Output of all ranks merged, identical lines folded.

    \b
    pawl logs demo              everything, cycle after cycle
    pawl logs demo -f           follow; Ctrl-C leaves the run going
    pawl logs demo --rank 3     one rank
    """
    from orchestrator.cli.actions import look as action

    raise typer.Exit(action.show_logs(run, follow=follow, rank=rank, runs_root=runs_root, site=site))


def explain(
    run: RunArgument, runs_root: RunsRootOption = None, site: SiteOption = None, as_json: JsonFlag = False
) -> None:
    """What happened, what it cost, and what you can do.

    Six lines: what happened, what pawl did, what it cost, state now, what you can do, where the evidence lies.

    \b
    pawl explain demo
    pawl explain demo --json
    """
    from orchestrator.cli.actions import look as action

    raise typer.Exit(action.show_explanation(run, runs_root=runs_root, site=site, as_json=as_json))


def report(
    run: RunArgument,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Where to write it [RUN_DIR/report.html].")
    ] = None,
    runs_root: RunsRootOption = None,
    site: SiteOption = None,
) -> None:
    """Write one HTML page about a run.

    Self-contained: loss, tokens/s, MFU, incidents as marks on the time axis, goodput.

    \b
    pawl report demo
    pawl report demo --out /tmp/demo.html
    """
    from orchestrator.cli.actions import look as action

    raise typer.Exit(action.write_report(run, out=out, runs_root=runs_root, site=site))


def register(app: typer.Typer) -> None:
    """Add these commands."""
    commands = (("status", status), ("watch", watch), ("logs", logs), ("explain", explain), ("report", report))
    for name, function in commands:
        app.command(name)(function)
