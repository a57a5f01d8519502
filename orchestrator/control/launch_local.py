"""The launcher that needs no Slurm: the supervisor as a detached process of this machine.

Everything else is the same as in an allocation; the nodes are process trees (`supervise.edge.LocalEdge`). The
supervisor gets a session of its own, so closing the terminal or Ctrl-C in `pawl watch` leaves the run going.
"""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.agent import proc
from orchestrator.agent.plan import parse_plan
from orchestrator.control import observe
from orchestrator.decide.observation import Liveness
from orchestrator.errors import PawlError
from orchestrator.state.fsio import write_atomic
from orchestrator.state.records import Unreadable
from orchestrator.state.rundir import RunPaths


def start_attempt(paths: RunPaths, plan: Mapping[str, Any], *, env: Mapping[str, str] | None = None) -> int:
    """Write plan.json and start the attempt's supervisor; its pid. `env` is added to this process's environment.

    Raises PawlError when the plan cannot be used or the supervisor cannot be started; nothing runs then.
    """
    attempt, nonce = int(plan["attempt"]), str(plan["nonce"])
    text = json.dumps(plan, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    checked = parse_plan(text)
    if isinstance(checked, Unreadable):
        raise PawlError(f"Attempt {attempt} cannot be started: its plan cannot be used: {checked.why}.")
    write_atomic(paths.attempt(attempt) / "plan.json", text, mode=0o640)
    command = (*plan["supervise"], *plan["torchrun"])
    environment = {**os.environ, **(env or {}), proc.NONCE_KEY: nonce, "PYTHONSAFEPATH": "1"}
    environment.pop(proc.NODE_KEY, None)
    try:
        with paths.supervisor_log(attempt).open("ab") as log:
            started = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=checked.workdir,
                start_new_session=True,
            )
    except OSError as error:
        raise PawlError(f"The supervisor {command[0]} could not be started: {error}.") from error
    return started.pid


def is_alive(paths: RunPaths, attempt: int) -> bool | None:
    """Whether anything of a local attempt may still run; None when that cannot be known from here."""
    intent, claim, problem = observe.read_attempt(paths, attempt)
    if problem is not None:
        return None
    liveness, _ = observe.local_liveness(intent, claim)
    return {Liveness.ALIVE: True, Liveness.DEAD: False}.get(liveness)


def command_of(python: Path, paths: RunPaths, attempt: int) -> tuple[str, ...]:
    """The supervisor's command up to and with `--`, for plans that are made by hand (tests, tools)."""
    return (
        *(str(python), "-m", "orchestrator", "supervise", "--run-dir", str(paths.root)),
        *("--attempt", str(attempt), "--launcher", "local", "--"),
    )
