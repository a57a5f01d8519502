"""Commands that ask something of a run or take something out of it: drain, cancel, save-now, profile, export, import,
data.
"""

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
    step: Annotated[
        list[int] | None, typer.Option("--step", help="Checkpoint of this step [the newest]; may be repeated.", min=1)
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every checkpoint that counts.")] = False,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Of the weights [the run's compute dtype].")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", metavar="DIR", help="Its folder [the one the run names].")
    ] = None,
    push_to_hub: Annotated[
        str | None, typer.Option("--push-to-hub", metavar="REPO", help="Upload it too, with your own token.")
    ] = None,
    executor: Annotated[
        str | None,
        typer.Option("--executor", metavar="slurm|local", help="One job for each step, all at once [here, in turn]."),
    ] = None,
    runs_root: RunsRootOption = None,
    site: SiteOption = None,
) -> None:
    """Write checkpoints as folders that transformers loads; several go to DIR/step-N each.

    \b
    pawl export demo --out exported
    pawl export demo --step 4000 --step 8000 --out exported
    pawl export demo --all --out exported --executor slurm
    """
    from orchestrator.cli.actions import convert as action

    wish = action.ExportWish(
        out=out, steps=tuple(step or ()), every=every, dtype=dtype, tokenizer=tokenizer, push_to_hub=push_to_hub,
        executor=executor,
    )  # fmt: skip
    raise typer.Exit(action.export_run(run, wish, runs_root=runs_root, site=site))


def import_(
    folder: Annotated[
        Path, typer.Argument(metavar="HF_DIR", help="Folder of a Hugging Face model.", show_default=False)
    ],
    out: Annotated[Path, typer.Option("--out", metavar="CKPT", help="Checkpoint to make.", show_default=False)],
) -> None:
    """Make a checkpoint of a Hugging Face model, for a run to start from.

    The model section in its config.yaml starts a run from its weights. Nothing is downloaded.

    \b
    pawl import models/SmolLM2-135M --out imported/smollm2
    """
    from orchestrator.cli.actions import convert as action

    raise typer.Exit(action.import_model(folder, out=out))


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
    commands = (*asked, ("export", export), ("import", import_), ("data", data))
    for name, function in commands:
        app.command(name)(function)
