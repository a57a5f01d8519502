"""Where a run comes from: who submitted what, with which code. Written once into code/provenance.json.

Unknown stays None: a folder without git has no commit, not an empty one. The argument list is kept with the values of
secret names blanked; a diff is counted, not kept, because working trees hold secrets more often than one thinks.
"""

import getpass
import hashlib
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from orchestrator import __version__
from orchestrator.config.secret_names import blanked_override
from orchestrator.errors import PawlError
from orchestrator.state.fsio import list_names, read_text, write_atomic
from orchestrator.state.rundir import RunPaths

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
        "versions": _versions(),
        "python": sys.executable,
    }


def renew(paths: RunPaths, *, by: str, now_unix: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write the record anew for the code as it is now: (the one before, the new one). The old stays as a numbered file.

    The work folder stays: relative paths of the config mean it. Raises PawlError when the old one cannot be read.
    """
    try:
        before: dict[str, Any] = json.loads(read_text(paths.provenance) or "")
        workdir = Path(str(before["workdir"]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PawlError(
            f"{paths.provenance} cannot be read, so the work folder is unknown. Restore the file."
        ) from error
    names = list_names(paths.code) or ()
    number = 1 + sum(name.startswith("provenance-") for name in names)
    after = {**before, "created_unix": now_unix, "by": by, "git": _git_state(workdir), "versions": _versions()}
    text = json.dumps(before, indent=2, ensure_ascii=False) + "\n"
    write_atomic(paths.code / f"provenance-{number:04d}.json", text)
    write_atomic(paths.provenance, json.dumps(after, indent=2, ensure_ascii=False) + "\n")
    return before, after


def code_line(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """What of the code changed, as a line: commit and versions that differ."""
    changes = []
    for label, was, now in (
        ("commit", _commit_of(before), _commit_of(after)),
        *((name, dict(before.get("versions") or {}).get(name), version) for name, version in after["versions"].items()),
    ):
        if was != now:
            changes.append(f"{label} {was or 'unknown'} → {now or 'unknown'}")
    return f"Code from now on: {', '.join(changes) or 'the same commit and versions as before'}."


def _commit_of(record: Mapping[str, Any]) -> str | None:
    git = record.get("git")
    return str(git["commit"])[:12] if isinstance(git, Mapping) and "commit" in git else None


def _versions() -> dict[str, str]:
    found = {name: version for name in _PACKAGES if (version := _version(name)) is not None}
    return {"python": platform.python_version(), "pawl": __version__, **found}


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
