"""The copies of a run's checkpoints, as `python -m trainer transfer` sees them."""

import json
import os
import subprocess
import sys

from orchestrator.control.observe import read_fences
from orchestrator.errors import PawlError
from orchestrator.state.copies import count_copies
from orchestrator.state.counting import Counting
from orchestrator.state.rundir import RunPaths

LIST_TIMEOUT_S = 300.0


def read_copies(paths: RunPaths, place: str) -> Counting:
    """Which checkpoints at `place` count for the run. Raises PawlError when that cannot be known."""
    fences = read_fences(paths)
    if fences is None:
        raise PawlError(f"{paths.attempts} cannot be listed, so it is unknown which copies count. Make it readable.")
    command = [sys.executable, "-m", "trainer", "transfer", "ls", place, "--json"]
    env = {**os.environ, "PYTHONSAFEPATH": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIST_TIMEOUT_S, env=env, check=False)
    except subprocess.TimeoutExpired as error:
        raise PawlError(f"{place} gave no list of its checkpoints within {LIST_TIMEOUT_S:g} s.") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise PawlError(f"{place} cannot be listed: {last[:500]}")
    try:
        return count_copies(json.loads(done.stdout)["checkpoints"], fences)
    except (ValueError, KeyError, TypeError) as error:
        raise PawlError(
            "`trainer transfer` answers in another version; install orchestrator and trainer together."
        ) from error
