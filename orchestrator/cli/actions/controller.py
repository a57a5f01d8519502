"""What `pawl controller` does: all runs of a folder, once or for ever, with metrics if asked."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from orchestrator.control.clock import SystemClock
from orchestrator.control.controller import Handling, Reconciled, reconcile_many, watch
from orchestrator.control.launchers import make_launcher
from orchestrator.decide.policy import policy_from_config
from orchestrator.state.provenance import whoami
from orchestrator.state.rundir import RunPaths
from orchestrator.state.runs import list_runs
from orchestrator.submit.facts import read_frozen

if TYPE_CHECKING:
    from orchestrator.metrics.exporter import Server


def handling_of(paths: RunPaths) -> Handling:
    """Launcher and thresholds of a run, from its frozen config. Raises PawlError."""
    frozen = read_frozen(paths)
    policy = policy_from_config(frozen.spec.recovery.model_dump(mode="json"))
    return Handling(launcher=make_launcher(frozen.spec.launcher.kind), policy=policy)


def control(root: Path, *, once: bool, observe: bool, metrics_port: int | None) -> int:
    """Reconcile all runs in `root`. --once: exit code 1 when any run could not be handled. Else until Ctrl-C."""
    clock, by = SystemClock(), whoami()
    server = _serve(root, metrics_port) if metrics_port is not None else None
    try:
        if once or observe:
            results = reconcile_many(list_runs(root), handling_of, clock=clock, by=by, observe_only=observe)
            _print_round(results, {})
            return 1 if any(result.error is not None for result in results) else 0
        said: dict[str, str] = {}
        typer.echo(f"Keeping the runs in {root} going. Ctrl-C ends the controller, the runs go on.")
        watch(lambda: list_runs(root), handling_of, clock=clock, by=by, report=lambda done: _print_round(done, said))
        return 0
    except KeyboardInterrupt:
        typer.echo("\nThe controller ended. Running jobs go on; nothing relaunches them until it is started again.")
        return 0
    finally:
        if server is not None:
            server.close()


def _print_round(results: Iterable[Reconciled], said: dict[str, str]) -> None:
    """A line per run, and only when it differs from the last one said."""
    for result in results:
        name = str(result.paths.root)
        if said.get(name) != result.done:
            said[name] = result.done
            typer.echo(f"{result.paths.root.name}: {result.done}", err=result.error is not None)


def _serve(root: Path, port: int) -> "Server":
    from orchestrator.metrics.exporter import serve
    from orchestrator.metrics.run import run_samples
    from orchestrator.views.run_view import run_view

    # On all addresses: Prometheus seldom runs on the login node.
    server = serve(lambda: run_samples([run_view(paths.root) for paths in list_runs(root)]), host="", port=port)
    typer.echo(f"Metrics of all runs: http://localhost:{server.port}/metrics")
    return server
