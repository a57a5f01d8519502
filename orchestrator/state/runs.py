"""Where runs live and which one a person means.

Order of `runs_root`: `--runs-root`, $PAWL_RUNS, the site file, ./runs. RUN on a command line is the name of a run
in that folder, or a path to a run directory.
"""

import errno
import os
from collections.abc import Mapping
from pathlib import Path

from orchestrator.errors import UsageError
from orchestrator.state.fsio import list_names
from orchestrator.state.rundir import RunPaths

_SHOWN = 80


def find_runs_root(*, option: Path | None, environ: Mapping[str, str], site_root: str | None) -> Path:
    """The folder of runs, absolute; it need not exist. Pure apart from the current folder and home."""
    chosen = option or environ.get("PAWL_RUNS") or site_root or "runs"
    return Path(os.path.abspath(Path(chosen).expanduser()))


def list_runs(runs_root: Path) -> tuple[RunPaths, ...]:
    """All run directories of the folder, by name."""
    names = list_names(runs_root)
    if names is None:
        raise UsageError(f"{runs_root} cannot be listed. Give another folder with --runs-root or $PAWL_RUNS.")
    found = (RunPaths(runs_root / name) for name in names if not name.startswith("."))
    return tuple(paths for paths in found if _holds_a_run(paths.root))


def find_run(run: str | None, *, runs_root: Path) -> RunPaths:
    """The run directory meant by RUN; without RUN the only one, or the one that was written to last.

    Raises UsageError naming the runs that do exist.
    """
    if run is None:
        return _latest_run(runs_root)
    for candidate in (runs_root / run, Path(run)) if run else ():
        if _holds_a_run(candidate):
            return RunPaths(Path(os.path.abspath(candidate)))
    known = ", ".join(paths.root.name for paths in list_runs(runs_root)[:12])
    shown = run if len(run) <= _SHOWN else f"{run[:_SHOWN]}…"
    raise UsageError(
        f"There is no run {shown!r} in {runs_root}, and no run directory of that path. "
        + (f"Runs there: {known}." if known else "That folder holds no runs; --runs-root or $PAWL_RUNS names another.")
    )


def _holds_a_run(folder: Path) -> bool:
    """Whether a run lies there. A text that no file can be called by (too long, with NUL) names none.

    A run whose run.yaml was lost is still one: it must not vanish from sight, it may be training.
    Raises OSError where that cannot be known, as in a folder that may not be entered.
    """
    try:
        paths = RunPaths(folder)
        return paths.config.is_file() or (paths.ledger.is_dir() and paths.attempts.is_dir())
    except ValueError:
        return False
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise


def _latest_run(runs_root: Path) -> RunPaths:
    runs = list_runs(runs_root)
    if not runs:
        raise UsageError(f"There are no runs in {runs_root}. Start one with `pawl submit CONFIG`, or give --runs-root.")
    return max(runs, key=lambda paths: paths.ledger.stat().st_mtime if paths.ledger.exists() else 0.0)
