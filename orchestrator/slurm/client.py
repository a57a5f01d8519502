"""Slurm's commands, run: argument lists only, a time limit on every call, stdout and stderr kept apart.

A failed call is told from an unknown one: `SubmitUnclear` says that a job may exist although sbatch did not
say so (a socket time-out after the controller had accepted it), and the caller settles that by the nonce in
the job's comment before it tries again.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from orchestrator.errors import PawlError, SlurmUnreachable
from orchestrator.slurm.environment import scrub_environment
from orchestrator.slurm.text import JobRef, parse_sbatch_reply

_UNREACHABLE = (
    "Unable to contact slurm controller",
    "Connection refused",
    "Munge encode failed",
    "authentication error",
)
_UNCLEAR = ("Socket timed out", "Zero Bytes were transmitted", "Message receive failure", "Transport endpoint")


class SubmitRefused(PawlError):
    """Slurm refused the job; the message carries Slurm's own words."""


class SubmitUnclear(PawlError):
    """sbatch gave no clear answer; a job may exist. Look for the nonce before another try."""


class SlurmClient(Protocol):
    """What the orchestrator asks of Slurm."""

    def submit(self, script: Path) -> JobRef:
        """Hand a batch script to Slurm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CliSlurm:
    """The client over Slurm's command line tools found on PATH."""

    timeout_s: float = 120.0
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def submit(self, script: Path) -> JobRef:
        """Run `sbatch --parsable SCRIPT`.

        Raises SlurmUnreachable (not installed, controller away), SubmitRefused (Slurm said no), SubmitUnclear
        (timed out, or exit 0 without a job id).
        """
        binary = find_sbatch(self.environ)
        done = self._run([binary, "--parsable", str(script)])
        if done.returncode != 0:
            raise _failure(done.stderr.strip(), returncode=done.returncode)
        job = parse_sbatch_reply(done.stdout)
        if job is None:
            raise SubmitUnclear(
                f"sbatch ended with exit code 0 but named no job (stdout {done.stdout.strip()[:200]!r}); a job may "
                "exist. Its comment would hold this attempt's nonce: look with `squeue --me -o '%i %k'`."
            )
        return job

    def _run(self, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                list(argv),
                env=scrub_environment(self.environ),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self.timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise SubmitUnclear(
                f"`{argv[0]}` did not answer within {self.timeout_s:g} s; the job may exist all the same. Its comment "
                "would hold this attempt's nonce: look with `squeue --me -o '%i %k'`."
            ) from error
        except OSError as error:
            raise SlurmUnreachable(f"`{argv[0]}` could not be started: {error}.") from error


def find_sbatch(environ: Mapping[str, str]) -> str:
    """Path of sbatch. Raises SlurmUnreachable, naming the launcher that needs no Slurm."""
    binary = shutil.which("sbatch", path=environ.get("PATH", ""))
    if binary is None:
        raise SlurmUnreachable(
            "There is no `sbatch` on this machine's PATH, so this run cannot be given to Slurm. Submit from a login "
            "node of the cluster, or train on this machine with `--launcher local`."
        )
    return binary


def _failure(stderr: str, *, returncode: int) -> PawlError:
    """The exception for an sbatch that ended badly, with Slurm's own words."""
    words = stderr[-600:] or "(it said nothing)"
    if any(text in stderr for text in _UNCLEAR):
        return SubmitUnclear(f"sbatch lost the controller's answer (exit code {returncode}): {words}")
    if any(text in stderr for text in _UNREACHABLE):
        return SlurmUnreachable(f"Slurm does not answer (sbatch exit code {returncode}): {words}")
    return SubmitRefused(f"Slurm refused the job (sbatch exit code {returncode}): {words}")
