"""Files as the contract wants them: whole or absent, never half.

A reader on another node sees the old file or the new one, because a write goes to a temporary name beside it, is
synced, and is renamed over it; the directory is synced last, or a power cut could undo the rename.
"""

import json
import os
from pathlib import Path

from trainer.errors import TrainerError


class RecordUnreadable(TrainerError):
    """A file of the contract is missing, torn, not JSON, or of another major version."""


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write `content` to `path` so that a reader sees all of it or what was there before. Raises OSError."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Make the names inside a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in `path`. Raises RecordUnreadable with the file named, whatever is wrong with it."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise RecordUnreadable(f"{path}: cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        raise RecordUnreadable(f"{path}: is not JSON ({error}).") from error
    if not isinstance(value, dict):
        raise RecordUnreadable(f"{path}: holds a JSON {type(value).__name__}, an object is expected.")
    return value
