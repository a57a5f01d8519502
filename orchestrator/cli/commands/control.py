"""Commands that ask something of a run or take something out of it: drain, cancel, save-now, profile, export, data."""

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import RunArgument, RunsRootOption, SiteOption

TimeoutOption = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", help="How long to wait for the answer.", min=0)
]


def drain(
    run: RunArgument, timeout: TimeoutOption = 120.0, runs_root: RunsRootOption = None, site: SiteOption = None
) -> None:
    """Checkpoint at the next step border, then end the job.

    `pawl resume` goes on from there.

    \b
    pawl drain demo
    pawl drain demo --timeout 600
    """
    from orchestrator.cli.actions import request as action

    raise typer.Exit(action.ask(run, "drain", timeout_s=timeout, runs_root=runs_root, site=site))


def cancel(
    run: RunArgument, timeout: TimeoutOption = 120.0, runs_root: RunsRootOption = None, site: SiteOption = None
) -> None:
    """End the job now, without a checkpoint.

    `pawl resume` goes on from the newest one.

    \b
    pawl cancel demo
    """
    from orchestrator.cli.actions import request as action

    raise typer.Exit(action.ask(run, "cancel", timeout_s=timeout, runs_root=runs_root, site=site))


def save_now(
    run: RunArgument, timeout: TimeoutOption = 120.0, runs_root: RunsRootOption = None, site: SiteOption = None
) -> None:
    """Write a checkpoint at the next step border and train on.

    \b
    pawl save-now demo
    """
    from orchestrator.cli.actions import request as action

    raise typer.Exit(action.ask(run, "save-now", timeout_s=timeout, runs_root=runs_root, site=site))


def profile(
    run: RunArgument,
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="How many steps to record.", min=1, max=100)] = 3,
    ranks: Annotated[str, typer.Option("--ranks", metavar="0,3|all", help="Which ranks record.")] = "0",
    timeout: TimeoutOption = 600.0,
    runs_root: RunsRootOption = None,
    site: SiteOption = None,
) -> None:
    """Record the next steps of a running run as traces, and train on.

    They lie in profile/ of the run directory: which operator ran when, for how long, on which ranks. All ranks wait
    while they are written; no number changes.

    \b
    pawl profile demo
    pawl profile demo --steps 1 --ranks 0,3
    pawl profile demo --ranks all --timeout 1800
    """
    from orchestrator.cli.actions import request as action

    code = action.profile(run, steps=steps, ranks_text=ranks, timeout_s=timeout, runs_root=runs_root, site=site)
    raise typer.Exit(code)


def export(
    run: RunArgument,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to make.", show_default=False)],
    step: Annotated[int | None, typer.Option("--step", help="Checkpoint of this step [the newest].", min=1)] = None,
    runs_root: RunsRootOption = None,
    site: SiteOption = None,
) -> None:
    """Write a checkpoint as a folder that transformers loads.

    \b
    pawl export demo --out exported
    pawl export demo --step 4000 --out exported-4000
    """
    from orchestrator.cli.actions import request as action

    raise typer.Exit(action.export_run(run, out=out, step=step, runs_root=runs_root, site=site))


def data() -> None:
    """Prepare and look at training data.

    \b
    pawl data tokenizer train --input texts/ --vocab-size 1024 --out tokenizer
    pawl data prepare --input texts/ --tokenizer tokenizer --out data/texts
    pawl data inspect data/texts
    """
    # `run` hands every `pawl data …` to the trainer before options are parsed; this entry is for the list of commands.
    from orchestrator.cli.app import pass_to_trainer

    raise typer.Exit(pass_to_trainer("data", ["--help"], prog="pawl data"))


def register(app: typer.Typer) -> None:
    """Add these commands."""
    asked = (("drain", drain), ("cancel", cancel), ("save-now", save_now), ("profile", profile))
    commands = (*asked, ("export", export), ("data", data))
    for name, function in commands:
        app.command(name)(function)
