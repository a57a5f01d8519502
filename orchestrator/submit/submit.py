"""A checked config becomes a run directory: all of it, or nothing.

    check ─▶ name free? ─▶ room and rights? ─▶ build .NAME.….making/ ─rename▶ RUNS_ROOT/NAME ─▶ controller

The directory is built under another name beside its place and renamed when it is complete, so that an interrupted or
failed submit leaves no half run, and two submits of one name end in one run and one clear refusal.
"""

import json
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import PawlError, UsageError
from orchestrator.state.codec import dumps
from orchestrator.state.epochs import Epoch
from orchestrator.state.fsio import fsync_dir, write_atomic
from orchestrator.state.ledger import Ledger
from orchestrator.state.records import LaunchFacts
from orchestrator.state.retention import Retention
from orchestrator.state.rundir import RunPaths, make_layout
from orchestrator.submit.quoting import check_text
from orchestrator.submit.secrets_file import write_secrets
from orchestrator.submit.space import nearest_existing, need_of, require_room

_MAX_NAME_BYTES = 128
_BEFORE_ANY_ATTEMPT = Epoch(0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRun:
    """Everything a run directory starts with. `config_text` is the whole merged YAML with secret values blanked;
    `run_created` is the data of the first ledger event."""

    facts: LaunchFacts
    config_text: str
    secret_env: Mapping[str, str]
    provenance: Mapping[str, Any]
    run_created: Mapping[str, Any]
    retention: Retention


def run_folder(runs_root: Path, name: str) -> Path:
    """Where run `name` lives. Raises UsageError for a name that is no folder name."""
    check_text(name, key="general.run")
    wrong = not name or "/" in name or name.startswith((".", "-")) or len(name.encode()) > _MAX_NAME_BYTES
    if wrong or name != name.strip():
        raise UsageError(
            f"general.run: {name[:80]!r} cannot name a run directory. Use at most {_MAX_NAME_BYTES} bytes without '/', "
            "no spaces at its ends, and neither '.' nor '-' first."
        )
    return runs_root / name


def check_place(runs_root: Path, run: NewRun) -> Path:
    """The run's future folder, if it can be made and filled. Changes nothing.

    Raises UsageError when the name is taken, PawlError for missing rights or room (`space.py`).
    """
    folder = run_folder(runs_root, run.facts.run)
    if os.path.lexists(folder):
        raise UsageError(
            f"The run {run.facts.run!r} exists already: {folder}. Go on with it by `pawl resume {run.facts.run}`, or "
            "submit under another name, for example with --set general.run=NAME."
        )
    parent = nearest_existing(runs_root)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise PawlError(
            f"The run directory {folder} cannot be made: {parent} is not a folder that you may write to. Give another "
            "place with --runs-root or $PAWL_RUNS."
        )
    require_room(run.facts.run, parent, need_of(run.facts, run.retention))
    return folder


Filler = Callable[[RunPaths, str], None]
"""What else goes into a directory being built (given with the ledger's writer), before it gets its name."""


def make_run(runs_root: Path, run: NewRun, *, writer: str, fill: Filler | None = None) -> RunPaths:
    """Make the run directory of `run` and return its paths. Raises as `check_place`, and PawlError when the file
    system refuses half-way; nothing is left behind then."""
    folder = check_place(runs_root, run)
    building = RunPaths(runs_root / f".{folder.name}.{secrets.token_hex(6)}.making")
    made = building.root
    try:
        _fill(building, run, writer=writer)
        if fill is not None:
            fill(building, writer)
        os.rename(building.root, folder)
        made = folder  # ours from here on: whoever comes second cannot rename onto it
        fsync_dir(runs_root)
    except OSError as error:
        shutil.rmtree(made, ignore_errors=True)
        if os.path.lexists(folder):
            raise UsageError(
                f"The run {run.facts.run!r} exists already: someone else made {folder} at the same moment. Look at it "
                f"with `pawl status {run.facts.run}`, or submit under another name."
            ) from error
        where = f" ({error.filename})" if error.filename else ""
        raise PawlError(
            f"The run directory {folder} could not be written: {error.strerror or error}{where}. Nothing was left "
            "behind; when the place takes files again, the same command makes the run."
        ) from error
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return RunPaths(folder)


def _fill(paths: RunPaths, run: NewRun, *, writer: str) -> None:
    make_layout(paths)
    write_atomic(paths.config, run.config_text)
    write_atomic(paths.launch_facts, dumps(run.facts, indent=2) + "\n")
    write_atomic(paths.provenance, json.dumps(run.provenance, indent=2, ensure_ascii=False) + "\n")
    write_secrets(paths.root, run.secret_env)
    Ledger(paths.root, writer).append(_BEFORE_ANY_ATTEMPT, "run_created", run.run_created)
