"""Secret variables of a run: one 0600 file in a 0700 folder, read by bash (`. file`) and by Python alike.

    WANDB_API_KEY='…'

Everywhere else (run.yaml, batch script, dry run, provenance, ledger, logs) their values are ***.
"""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from orchestrator.config.secret_names import is_secret
from orchestrator.errors import PawlError
from orchestrator.state.fsio import read_own
from orchestrator.submit.plan import SECRETS_FILE
from orchestrator.submit.quoting import check_variable, shell_quote


def split_secrets(env: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """(harmless, secret) variables by name."""
    secret = {name: value for name, value in env.items() if is_secret(name)}
    return {name: value for name, value in env.items() if name not in secret}, secret


def write_secrets(run_dir: Path, secret: Mapping[str, str]) -> Path | None:
    """Write the file; None without secrets. Raises UsageError for a value that is no single line, and OSError."""
    if not secret:
        return None
    path = run_dir / SECRETS_FILE
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.parent.chmod(0o700)
    lines = [
        f"{check_variable(name, key='slurm.env')}={shell_quote(value, key=f'slurm.env.{name}')}\n"
        for name, value in secret.items()
    ]
    # Never readable by others, not even for the moment between creation and chmod.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, 0o600)
        file.writelines(lines)
        file.flush()
        os.fsync(descriptor)
    return path


def read_secrets(run_dir: Path) -> dict[str, str]:
    """The variables for a process that pawl starts itself; {} without a file.

    Raises PawlError when others could have written the file: it would put variables into every rank.
    """
    path = run_dir / SECRETS_FILE
    try:
        return dict(word.split("=", 1) for word in shlex.split(read_own(path, private=True)))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        # The error quotes nothing of the file: its lines are secrets.
        raise PawlError(f"{path} is damaged: it holds something else than NAME=value lines. Restore it.") from error
