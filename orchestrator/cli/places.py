"""From options and environment to folders: the runs root, one run. Shared by all commands."""

import os
from pathlib import Path

from orchestrator.state.rundir import RunPaths
from orchestrator.state.runs import find_run, find_runs_root


def runs_folder(option: Path | None, *, site: Path | None) -> Path:
    """The folder of runs. The site file is read only when nothing else names one."""
    site_root = None
    if option is None and not os.environ.get("PAWL_RUNS"):
        from orchestrator.config.site import find_site, load_site

        site_root = load_site(find_site(site)).runs_root
    return find_runs_root(option=option, environ=os.environ, site_root=site_root)


def the_run(run: str | None, *, runs_root: Path | None, site: Path | None) -> RunPaths:
    """The run directory that a command is about."""
    return find_run(run, runs_root=runs_folder(runs_root, site=site))
