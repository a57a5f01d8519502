"""What status, watch, logs, explain and report do. Everything shown comes from one RunView."""

import json
from pathlib import Path

import typer

from orchestrator.cli.places import runs_folder, the_run
from orchestrator.errors import RunHeld
from orchestrator.state.runs import list_runs
from orchestrator.views.human import harmless
from orchestrator.views.records import RunState
from orchestrator.views.run_view import run_view, to_json

_STILL_RUNNING = (
    "Stopped looking; the run {run} goes on. Look again with `pawl watch {run}`, end it with `pawl drain {run}`."
)


def show_status(run: str | None, *, runs_root: Path | None, site: Path | None, as_json: bool) -> int:
    """One run in full (exit code 3 when it is HELD), or all runs, a line each."""
    from orchestrator.views import status

    if run is None:
        runs = list_runs(runs_folder(runs_root, site=site))
        views = [run_view(paths.root) for paths in runs]
        if as_json:
            _print_json([to_json(view) for view in views])
        elif not views:
            typer.echo(f"No runs in {runs_folder(runs_root, site=site)}.")
        else:
            typer.echo(status.render_list(views))
        return 0
    view = run_view(the_run(run, runs_root=runs_root, site=site).root)
    if as_json:
        _print_json(to_json(view))
    else:
        typer.echo(status.render(view))
    return RunHeld.exit_code if view.state is RunState.HELD else 0


def watch_run(run: str | None, *, runs_root: Path | None, site: Path | None) -> int:
    """Live view until the run is over or Ctrl-C."""
    return watch_directory(the_run(run, runs_root=runs_root, site=site).root)


def watch_directory(run_dir: Path) -> int:
    """Watch; Ctrl-C ends the watching only. Exit code: 0, 1 when the run FAILED, 3 when it is HELD."""
    from orchestrator.views import watch

    return watch.run(run_dir)


def show_logs(run: str, *, follow: bool, rank: int | None, runs_root: Path | None, site: Path | None) -> int:
    """Merged output of the ranks."""
    from orchestrator.views import logs

    paths = the_run(run, runs_root=runs_root, site=site)
    try:
        logs.run(paths.root, follow=follow, rank=rank)
    except KeyboardInterrupt:
        typer.echo("\n" + _STILL_RUNNING.format(run=harmless(paths.root.name)), err=True)
    return 0


def show_explanation(run: str, *, runs_root: Path | None, site: Path | None, as_json: bool) -> int:
    """The six answers about a run."""
    from orchestrator.views import explain

    view = run_view(the_run(run, runs_root=runs_root, site=site).root)
    if as_json:
        _print_json(explain.to_json(view))
    else:
        typer.echo(explain.text(view))
    return 0


def write_report(run: str, *, out: Path | None, runs_root: Path | None, site: Path | None) -> int:
    """The HTML page."""
    from orchestrator.views import report

    paths = the_run(run, runs_root=runs_root, site=site)
    typer.echo(harmless(f"Wrote {report.write_report(paths.root, out)}"))
    return 0


def _print_json(data: object) -> None:
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))
