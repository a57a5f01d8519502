"""Files that are either whole or absent: temp, fsync, rename, fsync of the directory.

Readers get `None` for "could not read", never an exception in the middle of a decision. `claim` is the one lock of the
run directory: a hard link, because `O_EXCL` and `flock` are not to be trusted on every NFS, while the link count is.
"""

import errno
import os
import secrets
import stat
from pathlib import Path
from typing import BinaryIO

from orchestrator.errors import PawlError

MAX_RECORD_BYTES = 64 * 1024 * 1024


def fsync_dir(path: Path) -> None:
    """Make a rename or a new name in `path` durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, text: str, *, mode: int = 0o640, durable: bool = True) -> None:
    """Write `path` whole: it holds the old text or the new one at every instant.

    `durable` False leaves out the fsyncs, for records that are written again within seconds. Raises OSError; the
    temporary file is gone then.
    """
    temp = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        _write_new(temp, text, mode=mode, durable=durable)
        os.replace(temp, path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    if durable:
        fsync_dir(path.parent)


def _write_new(path: Path, text: str, *, mode: int, durable: bool) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    with os.fdopen(fd, "wb") as file:
        os.fchmod(fd, mode)  # the umask must not widen nor narrow what the record asks for
        file.write(text.encode())
        file.flush()
        if durable:
            os.fsync(fd)


def open_plain(path: Path) -> BinaryIO:
    """Open a regular file for reading; a folder, FIFO or device in its place is an OSError and never waited for.

    Raises OSError, and ValueError for a path that no file can have.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    # Not left to fdopen: it would raise on a folder and leak the descriptor.
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "is no plain file", str(path))
    return os.fdopen(fd, "rb")


def read_text(path: Path, *, limit: int = MAX_RECORD_BYTES) -> str | None:
    """The text of a regular file, or None when it is absent, unreadable, no UTF-8, no plain file or over `limit` bytes.

    Nothing put in the place of a record may block the loop that reads it.
    """
    try:
        with open_plain(path) as file:
            data = file.read(limit + 1)
        return None if len(data) > limit else data.decode()
    except (OSError, ValueError):  # UnicodeDecodeError is a ValueError
        return None


def read_own(path: Path, *, private: bool = False, limit: int = MAX_RECORD_BYTES) -> str:
    """The text of a plain file that nobody else could have written (`private`: nor read), links not followed.

    Raises FileNotFoundError, and PawlError naming the file and what is wrong with it for everything else.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise PawlError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    try:
        _check_own(path, os.fstat(fd), private=private)
        with os.fdopen(fd, "rb", closefd=False) as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise PawlError(f"{path} cannot be read: {error.strerror}.") from error
    finally:
        os.close(fd)
    if len(data) > limit:
        raise PawlError(f"{path} has more than {limit} bytes, which no such file has.")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise PawlError(f"{path} is damaged: its byte {error.start} is no UTF-8 text. Restore the file.") from error


def _check_own(path: Path, info: os.stat_result, *, private: bool) -> None:
    mode = stat.S_IMODE(info.st_mode)
    if not stat.S_ISREG(info.st_mode):
        raise PawlError(f"{path} is no regular file; pawl uses nothing from it.")
    if info.st_uid != os.geteuid() or mode & (0o077 if private else 0o022):
        wanted, fix = ("mode 0600", "600") if private else ("files that nobody else may write", "go-w")
        raise PawlError(
            f"{path} belongs to uid {info.st_uid} with mode {mode:o}; pawl of uid {os.geteuid()} uses only its own "
            f"files here, {wanted}. If its content is yours: chmod {fix} {path}"
        )


def list_names(path: Path) -> tuple[str, ...] | None:
    """Sorted names in a directory; () when it does not exist, None when it cannot be listed (unknown is not empty)."""
    try:
        return tuple(sorted(os.listdir(path)))
    except FileNotFoundError:
        return ()
    except OSError:
        return None


def claim(path: Path, text: str, *, mode: int = 0o640) -> bool:
    """Create `path` with `text` exactly once among all who try; True for the winner. Raises OSError on other faults.

    The answer of link() is not believed: over NFS a retransmitted call may answer EEXIST to the winner. The link count
    of our own temporary file tells (open(2), "O_EXCL").
    """
    temp = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    _write_new(temp, text, mode=mode, durable=True)
    try:
        try:
            os.link(temp, path)
        except FileExistsError:
            won = os.stat(temp).st_nlink == 2
        else:
            won = os.stat(temp).st_nlink == 2
    finally:
        temp.unlink(missing_ok=True)
    fsync_dir(path.parent)
    return won


def append_line(path: Path, line: str, *, mode: int = 0o640) -> None:
    """Append one line with fsync; a torn end left by a crash is closed first. One writer per file. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        size = os.fstat(fd).st_size
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        data = (b"\n" if torn else b"") + line.encode() + b"\n"
        while data:
            data = data[os.write(fd, data) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    if size == 0:
        fsync_dir(path.parent)
