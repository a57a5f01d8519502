"""`pawl ckpt …` and `pawl clean`: what lies in checkpoints/, and what of it goes."""

from typing import Annotated

import typer

from orchestrator.cli.options import JsonFlag, RunArgument, RunsRootOption, SiteOption

CheckpointArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN@STEP", help="A checkpoint: of a run, its step or its folder's name.", show_default=False
    ),
]
YesFlag = Annotated[bool, typer.Option("--yes", help="Do not ask.")]

ckpt = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Look at checkpoints, verify, compare, keep and remove them.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


@ckpt.command("ls")
def ls(run: RunArgument, runs_root: RunsRootOption = None, site: SiteOption = None, as_json: JsonFlag = False) -> None:
    """All that lies in checkpoints/, newest first.

    What counts, what does not and why, what stays.

    \b
    pawl ckpt ls demo
    pawl ckpt ls demo --json
    """
    from orchestrator.cli.actions import ckpt as action

    raise typer.Exit(action.show(run, runs_root=runs_root, site=site, as_json=as_json))


@ckpt.command("verify")
def verify(
    checkpoint: Annotated[
        str, typer.Argument(metavar="RUN[@STEP]", help="A checkpoint, or a run: its newest.", show_default=False)
    ],
    every: Annotated[bool, typer.Option("--all", help="Every complete checkpoint of the run.")] = False,
    runs_root: RunsRootOption = None,
    site: SiteOption = None,
) -> None:
    """Read every byte of a checkpoint and compare sizes and digests. Exit code 1 when one is damaged.

    \b
    pawl ckpt verify demo                 the newest that counts
    pawl ckpt verify demo@4000
    pawl ckpt verify demo --all
    """
    from orchestrator.cli.actions import ckpt as action

    raise typer.Exit(action.verify(checkpoint, every=every, runs_root=runs_root, site=site))


@ckpt.command("rm")
def rm(
    checkpoint: CheckpointArgument, yes: YesFlag = False, runs_root: RunsRootOption = None, site: SiteOption = None
) -> None:
    """Remove a checkpoint for good. Asks first.

    Refused: the last two that count, the one the newest launch resumed from, kept ones, and what a launch may still
    be writing.

    \b
    pawl ckpt rm demo@4000
    pawl ckpt rm demo@step-000004000.a0001g01c0001 --yes
    """
    from orchestrator.cli.actions import ckpt as action

    raise typer.Exit(action.remove(checkpoint, yes=yes, runs_root=runs_root, site=site))


@ckpt.command("diff")
def diff(
    one: Annotated[str, typer.Argument(metavar="A", help="RUN@STEP, or the path of a checkpoint.", show_default=False)],
    other: Annotated[str, typer.Argument(metavar="B", help="The other one.", show_default=False)],
    runs_root: RunsRootOption = None,
    site: SiteOption = None,
    as_json: JsonFlag = False,
) -> None:
    """In what two checkpoints differ.

    Config, mesh, step, and each tensor, the largest difference first.

    \b
    pawl ckpt diff demo@4000 demo@8000
    pawl ckpt diff demo@4000 other@4000 --json
    """
    from orchestrator.cli.actions import ckpt as action

    raise typer.Exit(action.diff(one, other, runs_root=runs_root, site=site, as_json=as_json))


@ckpt.command("keep")
def keep(
    checkpoint: CheckpointArgument,
    name: Annotated[str, typer.Option("--name", metavar="TEXT", help="What it is kept for.")] = "",
    runs_root: RunsRootOption = None,
    site: SiteOption = None,
) -> None:
    """Keep a checkpoint: no retention deletes it until it is released.

    \b
    pawl ckpt keep demo@4000 --name "before the decay"
    """
    from orchestrator.cli.actions import ckpt as action

    raise typer.Exit(action.keep(checkpoint, label=name, runs_root=runs_root, site=site))


@ckpt.command("release")
def release(checkpoint: CheckpointArgument, runs_root: RunsRootOption = None, site: SiteOption = None) -> None:
    """Let retention have a kept checkpoint again.

    \b
    pawl ckpt release demo@4000
    """
    from orchestrator.cli.actions import ckpt as action

    raise typer.Exit(action.release(checkpoint, runs_root=runs_root, site=site))


UrlOption = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="Where copies lie: s3://…, gs://…, file:///… [checkpoints.upload_to]."),
]


@ckpt.command("push")
def push(
    checkpoint: Annotated[
        str, typer.Argument(metavar="RUN[@STEP]", help="A checkpoint, or a run: its newest.", show_default=False)
    ],
    url: UrlOption = None,
    runs_root: RunsRootOption = None,
    site: SiteOption = None,
) -> None:
    """Copy a checkpoint to URL/RUN/. May be run again: what has arrived is not sent twice.

    With checkpoints.upload_to a running run does it by itself.

    \b
    pawl ckpt push demo --url s3://bucket/runs
    pawl ckpt push demo@4000
    """
    from orchestrator.cli.actions import copies as action

    raise typer.Exit(action.push(checkpoint, url=url, runs_root=runs_root, site=site))


@ckpt.command("pull")
def pull(
    checkpoint: Annotated[
        str,
        typer.Argument(metavar="RUN[@STEP]", help="A copy, or a run: its newest that counts.", show_default=False),
    ],
    url: UrlOption = None,
    runs_root: RunsRootOption = None,
    site: SiteOption = None,
) -> None:
    """Bring a copy back into checkpoints/, every byte verified.

    \b
    pawl ckpt pull demo
    pawl ckpt pull demo@4000 --url s3://bucket/runs
    """
    from orchestrator.cli.actions import copies as action

    raise typer.Exit(action.pull(checkpoint, url=url, runs_root=runs_root, site=site))


@ckpt.command("copies")
def copies(
    run: RunArgument,
    url: UrlOption = None,
    runs_root: RunsRootOption = None,
    site: SiteOption = None,
    as_json: JsonFlag = False,
) -> None:
    """What copies of a run there are, and which of them count.

    \b
    pawl ckpt copies demo
    pawl ckpt copies demo --url s3://bucket/runs --json
    """
    from orchestrator.cli.actions import copies as action

    raise typer.Exit(action.show(run, url=url, runs_root=runs_root, site=site, as_json=as_json))


def clean(
    run: RunArgument,
    apply: Annotated[bool, typer.Option("--apply", help="Remove what is listed.")] = False,
    older_than: Annotated[
        float, typer.Option("--logs-older-than", metavar="DAYS", help="Logs and evidence that go.", min=0)
    ] = 14.0,
    runs_root: RunsRootOption = None,
    site: SiteOption = None,
    as_json: JsonFlag = False,
) -> None:
    """What a run holds that it does not need any more, with sizes. Removes it only with --apply.

    Quarantined and unfinished checkpoints, trash, checkpoints that retention lets go or a later launch went back
    before, logs and evidence of cycles long past. Never what a launch may still use.

    \b
    pawl clean demo
    pawl clean demo --apply
    pawl clean demo --logs-older-than 2
    """
    from orchestrator.cli.actions import clean as action

    code = action.clean(run, apply=apply, logs_days=older_than, runs_root=runs_root, site=site, as_json=as_json)
    raise typer.Exit(code)


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.add_typer(ckpt, name="ckpt")
    app.command("clean")(clean)
