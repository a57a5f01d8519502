"""Where a run comes from: who submitted what, with which code. Written once into code/provenance.json.

Unknown stays None: a folder without git has no commit, not an empty one. The argument list is kept with the values of
secret names blanked; a diff is counted, not kept, because working trees hold secrets more often than one thinks.
"""

import getpass
import hashlib
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from orchestrator import __version__
from orchestrator.config.secret_names import blanked_override

_PACKAGES = ("pawl-train", "torch", "numpy", "transformers", "tokenizers", "safetensors")
_GIT_TIMEOUT_S = 10


def whoami() -> str:
    """user@host, for records that say who did something."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a uid without a name, as in containers
        user = str(os.geteuid())
    return f"{user}@{socket.gethostname()}"


def collect_provenance(
    *, config_path: Path, overrides: Sequence[str], workdir: Path, now_unix: float
) -> dict[str, Any]:
    """The record. Runs git twice; takes versions from package metadata, without importing the packages."""
    return {
        "schema_version": 1,
        "created_unix": now_unix,
        "by": whoami(),
        "workdir": str(workdir),
        "config_file": str(config_path),
        "config_sha256": hashlib.sha256(config_path.read_bytes()).hexdigest(),
        "overrides": [blanked_override(override) for override in overrides],
        "git": _git_state(workdir),
        "versions": {
            "python": platform.python_version(),
            "pawl": __version__,
            **{name: version for name in _PACKAGES if (version := _version(name)) is not None},
        },
        "python": sys.executable,
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git_state(folder: Path) -> dict[str, Any] | None:
    """Commit and size of the uncommitted change in bytes; None where there is no git or no repository."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    diff = _git(folder, "diff", "HEAD")
    return {"commit": commit.strip(), "diff_bytes": None if diff is None else len(diff.encode())}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
