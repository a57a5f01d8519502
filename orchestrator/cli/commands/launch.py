"""Commands that look at a config or start something: check, render, submit, resume, fork, controller."""

from typing import Annotated

import typer

from orchestrator.cli.options import (
    ConfigArgument,
    JsonFlag,
    RunArgument,
    RunsRootOption,
    SetOption,
    SiteOption,
)

LauncherOption = Annotated[
    str | None,
    typer.Option("--launcher", metavar="slurm|local", help="Who starts the processes [the config's, else slurm]."),
]


def check(
    config: ConfigArgument,
    overrides: SetOption = None,
    here: Annotated[bool, typer.Option("--here", help="Paths and tools of this machine must be right, too.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Every value and where it comes from.")] = False,
    runs_root: RunsRootOption = None,
    site: SiteOption = None,
    as_json: JsonFlag = False,
) -> None:
    """All problems of a config at once, with the memory it needs. Exit code 2 when there are any.

    \b
    pawl check run.yaml
    pawl check run.yaml --set parallelism.tp=4 --show
    pawl check run.yaml --here          from the login node, before a submit
    """
    from orchestrator.cli.actions import check as action

    code = action.check_config(
        config,
        overrides=tuple(overrides or ()),
        here=here,
        show=show,
        site=site,
        as_json=as_json,
        runs_root=runs_root,
    )
    raise typer.Exit(code)


def render(
    config: ConfigArgument,
    overrides: SetOption = None,
    plain: Annotated[bool, typer.Option("--plain", help="The classical job without supervisor.")] = False,
    runs_root: RunsRootOption = None,
    site: SiteOption = None,
) -> None:
    """Print the batch script that a submit would hand to Slurm. Writes nothing.

    \b
    pawl render run.yaml
    pawl render run.yaml --plain > job.sbatch
    """
    from orchestrator.cli.actions import launch as action

    script = action.render_script(config, overrides=tuple(overrides or ()), plain=plain, runs_root=runs_root, site=site)
    typer.echo(script, nl=False)


def submit(
    config: ConfigArgument,
    launcher: LauncherOption = None,
    overrides: SetOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and show everything, start nothing.")] = False,
    watching: Annotated[bool, typer.Option("--watch", help="Watch the run afterwards.")] = False,
    runs_root: RunsRootOption = None,
    site: SiteOption = None,
) -> None:
    """Check the config, make the run directory, start the run.

    The job is called slurm.job_name, else general.run; SBATCH_* and SLURM_* variables of your shell are not passed on.

    \b
    pawl submit run.yaml                       to Slurm
    pawl submit run.yaml --launcher local      on this machine, with the GPUs it has
    pawl submit run.yaml --dry-run
    """
    from orchestrator.cli.actions import launch as action

    code = action.submit_config(
        config,
        launcher=launcher,
        overrides=tuple(overrides or ()),
        dry_run=dry_run,
        watching=watching,
        runs_root=runs_root,
        site=site,
    )
    raise typer.Exit(code)


def resume(
    run: RunArgument,
    overrides: SetOption = None,
    why: Annotated[str, typer.Option("--why", metavar="TEXT", help="Reason, kept with the change.")] = "",
    code: Annotated[
        str | None,
        typer.Option("--code", metavar="current", help="Record that the code changed: commit and versions of now."),
    ] = None,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="Begin again at step 1 where no checkpoint is left.")
    ] = False,
    runs_root: RunsRootOption = None,
    site: SiteOption = None,
) -> None:
    """Let a stopped run go on, with changed values if asked.

    Free keys (slurm, recovery, layout) change at will, recorded ones (learning rate, steps, weights) from a step on;
    fixed ones (model, seed) would make it another run and are refused.

    \b
    pawl resume demo
    pawl resume demo --set recovery.spares=2 --why "two nodes are flaky"
    pawl resume demo --set tokens.train_steps=20000
    pawl resume demo --code current --why "the loader's fix"
    """
    from orchestrator.cli.actions import launch as action

    changes = tuple(overrides or ())
    exit_code = action.resume_run(
        run, overrides=changes, why=why, code=code, from_start=from_start, runs_root=runs_root, site=site
    )
    raise typer.Exit(exit_code)


def fork(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN[@STEP]", help="The run, and the step of a checkpoint [its newest].", show_default=False
        ),
    ],
    new: Annotated[str, typer.Option("--run", metavar="NEW", help="Name of the new run.", show_default=False)],
    overrides: SetOption = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Start at step 0 from its weights, with fresh moments and data.")
    ] = False,
    why: Annotated[str, typer.Option("--why", metavar="TEXT", help="Reason, kept with the run.")] = "",
    launcher: LauncherOption = None,
    no_start: Annotated[bool, typer.Option("--no-start", help="Make it HELD; `pawl resume NEW` starts it.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and show everything, make nothing.")] = False,
    watching: Annotated[bool, typer.Option("--watch", help="Watch the new run afterwards.")] = False,
    runs_root: RunsRootOption = None,
    site: SiteOption = None,
) -> None:
    """Make a new run that starts from a checkpoint of another, and start it.

    It goes on at that step with moments and data position; any key may change that leaves the shapes of tensors as
    they are. The source is only read: it may train on, and delete its checkpoint later.

    \b
    pawl fork demo@4000 --run demo-lr2 --set optimizer.learning_rate_scheduler.learning_rate=1e-4
    pawl fork demo --run demo-longer --set tokens.train_steps=20000 --why "loss still falls"
    pawl fork demo --run demo-code --weights-only --set data.dataset.dataset_folder=[code] --no-start
    """
    from orchestrator.cli.actions import fork as action

    code = action.fork_run(
        source,
        new=new,
        overrides=tuple(overrides or ()),
        weights_only=weights_only,
        why=why,
        launcher=launcher,
        starts=not no_start,
        dry_run=dry_run,
        watching=watching,
        runs_root=runs_root,
        site=site,
    )
    raise typer.Exit(code)


def controller(
    once: Annotated[bool, typer.Option("--once", help="Look at every run once and end (for cron).")] = False,
    observe: Annotated[bool, typer.Option("--observe", help="Decide and say, but change nothing.")] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option("--metrics-port", help="Serve metrics of all runs here; 0: any free port.", min=0, max=65535),
    ] = None,
    runs_root: RunsRootOption = None,
    site: SiteOption = None,
) -> None:
    """Keep all runs going until each is done or held.

    Relaunches what ended early. Two controllers at once are harmless; runs train on without one.

    \b
    pawl controller --metrics-port 9400
    pawl controller --once
    """
    from orchestrator.cli.actions import launch as action

    code = action.run_controller(once=once, observe=observe, metrics_port=metrics_port, runs_root=runs_root, site=site)
    raise typer.Exit(code)


def register(app: typer.Typer) -> None:
    """Add these commands."""
    commands = (
        ("check", check), ("render", render), ("submit", submit), ("resume", resume), ("fork", fork),
        ("controller", controller),
    )  # fmt: skip
    for name, function in commands:
        app.command(name)(function)
