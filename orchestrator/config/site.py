"""The site file: what is true of this cluster for every run, written once. It lies under each config.

    runs_root: /scratch/me/runs           where runs live
    paths: {data: /scratch/shared/data}   used in a config as ${paths.data}
    slurm: {account: x, gpu_request: gres, prologue: module load cuda}     defaults of any orchestrator section

Order: site < config < --set. Named by --site or $PAWL_SITE, else ~/.config/pawl/site.yaml.
"""

import os
from collections.abc import Mapping as Environ
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import ConfigProblems, UsageError

from .problems import Problem, Severity, did_you_mean, format_problem, has_errors
from .spec import SECTIONS
from .yaml_loader import Mapping, Scalar, load_file

KEYS = ("runs_root", "paths", *SECTIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What a command without a config needs of the site file."""

    file: Path | None
    runs_root: str | None
    paths: dict[str, str]


NO_SITE = Site(file=None, runs_root=None, paths={})


def find_site(option: Path | None, *, environ: Environ[str, str] = os.environ) -> Path | None:
    """The site file in use, None when there is none. One that was named must exist: raises UsageError."""
    named = option or (Path(environ["PAWL_SITE"]) if environ.get("PAWL_SITE") else None)
    if named is not None:
        if not named.expanduser().is_file():
            raise UsageError(f"The site file {named} does not exist. Correct --site or $PAWL_SITE.")
        return named.expanduser()
    default = Path("~/.config/pawl/site.yaml").expanduser()
    return default if default.is_file() else None


def load_site(file: Path | None) -> Site:
    """Read the site file; raises ConfigProblems listing everything wrong with it."""
    if file is None:
        return NO_SITE
    document = load_file(file)
    root, problems = document.root, [*document.problems, *_unknown(document.root)]
    if has_errors(problems):
        raise ConfigProblems("\n".join(format_problem(problem) for problem in problems))
    runs_root, paths = root.entries.get("runs_root"), root.entries.get("paths")
    return Site(
        file=file,
        runs_root=runs_root.text if isinstance(runs_root, Scalar) and not runs_root.is_null else None,
        paths={key: node.text for key, node in paths.entries.items() if isinstance(node, Scalar)}
        if isinstance(paths, Mapping)
        else {},
    )


def _unknown(root: Mapping) -> list[Problem]:
    return [
        Problem(
            severity=Severity.ERROR, file=node.file, line=node.line, key=key, found=None,
            expected=did_you_mean(key, KEYS), message="unknown key in the site file",
        )
        for key, node in root.entries.items()
        if key not in KEYS
    ]  # fmt: skip
