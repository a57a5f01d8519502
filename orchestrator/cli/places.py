"""From options and environment to folders: the site file, the runs root, one run. Shared by all commands."""

import os
from pathlib import Path

from orchestrator.errors import UsageError
from orchestrator.rundir import RunPaths
from orchestrator.runs import find_run, find_runs_root


def site_file(option: Path | None) -> Path | None:
    """The site file in use: --site, $PAWL_SITE, ~/.config/pawl/site.yaml; None when there is none.

    One that was named must exist (UsageError); the default place may be empty.
    """
    named = option or (Path(os.environ["PAWL_SITE"]) if os.environ.get("PAWL_SITE") else None)
    if named is not None:
        if not named.expanduser().is_file():
            raise UsageError(f"The site file {named} does not exist. Correct --site or $PAWL_SITE.")
        return named.expanduser()
    default = Path("~/.config/pawl/site.yaml").expanduser()
    return default if default.is_file() else None


def runs_folder(option: Path | None, *, site: Path | None) -> Path:
    """The folder of runs. Reads the site file only when nothing else names one."""
    site_root = None
    if option is None and not os.environ.get("PAWL_RUNS"):
        path = site_file(site)
        site_root = _root_in_site(path) if path else None
    return find_runs_root(option=option, environ=os.environ, site_root=site_root)


def the_run(run: str | None, *, runs_root: Path | None, site: Path | None) -> RunPaths:
    """The run directory that a command is about."""
    return find_run(run, runs_root=runs_folder(runs_root, site=site))


def _root_in_site(path: Path) -> str | None:
    from orchestrator.config.yaml_loader import Scalar, load_file

    document = load_file(path)
    if document.problems:
        from orchestrator.config.problems import format_problem

        raise UsageError("\n".join(format_problem(problem) for problem in document.problems))
    node = document.root.entries.get("runs_root")
    return node.text if isinstance(node, Scalar) and node.text else None
