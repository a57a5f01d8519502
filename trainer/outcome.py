"""How a rank ends: one exception in, one outcome file and one exit code out.

Exit codes do not survive torchrun with their meaning (it reports the first failure of a node and exits 1), so each rank
that ends under its own control leaves outcomes/rank-00042.json. No file from a rank means that it died without control,
which is itself a fact.
"""

import errno
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from trainer.errors import CheckpointInvalid, DesyncError, TrainerError
from trainer.fsio import write_atomic
from trainer.records import ExceptionFacts, Outcome, to_json

DONE, DRAINED, CRASHED, HANG_SELF_KILL, STORAGE = 0, 75, 1, 90, 92
STORAGE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.EREMOTEIO})


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Why a rank ends. `checkpoint` is the newest one this process committed or loaded, `suspects` are ranks."""

    kind: str
    exit_code: int
    message: str
    exception: ExceptionFacts | None = None
    checkpoint: str | None = None
    bad_file: Path | None = None
    suspects: tuple[int, ...] = ()


def ending_of(error: BaseException, *, checkpoint: str | None = None) -> Ending:
    """The ending an exception stands for; what is no TrainerError is a crash.

    A crash because a file system is full or failing has an exit code of its own: there, the outcome file that would
    say so cannot be written either.
    """
    known = isinstance(error, TrainerError)
    crashed = STORAGE if is_storage_error(error) else CRASHED
    return Ending(
        kind=error.kind if isinstance(error, TrainerError) else "crashed",
        exit_code=error.exit_code if isinstance(error, TrainerError) and error.exit_code != CRASHED else crashed,
        message=str(error) if known and str(error) else f"{type(error).__name__}: {error}",
        exception=ExceptionFacts(type=type(error).__name__, message=str(error), frame=innermost_frame(error)),
        checkpoint=checkpoint,
        bad_file=error.bad_file if isinstance(error, CheckpointInvalid) else None,
        suspects=error.suspects if isinstance(error, DesyncError) else (),
    )


def is_storage_error(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, says that a file system is full or failing."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        if isinstance(error, OSError) and error.errno in STORAGE_ERRORS:
            return True
        seen.add(id(error))
        error = error.__cause__
    return False


def innermost_frame(error: BaseException) -> str:
    """`file:line in function` of the frame that raised; empty for an exception that was never raised."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    frame = frames[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


def outcome_path(cycle_dir: Path, rank: int) -> Path:
    """Where a rank's outcome lies."""
    return cycle_dir / "outcomes" / f"rank-{rank:05d}.json"


def write_outcome(outcome: Outcome, *, cycle_dir: Path) -> None:
    """Leave the outcome of this rank. Raises OSError."""
    path = outcome_path(cycle_dir, outcome.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, to_json(outcome) + "\n")


def relative_to_run(path: Path | None, run_dir: Path) -> str | None:
    """A path as records hold it: relative to the run directory when it lies inside."""
    if path is None:
        return None
    return str(path.relative_to(run_dir) if path.is_relative_to(run_dir) else path)


def leave(code: int) -> NoReturn:
    """End the process now.

    No interpreter or process-group teardown: it can wait for ever for a peer that is gone, and a job whose work is
    saved would hold its nodes.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
