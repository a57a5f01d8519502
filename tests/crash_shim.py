"""A file system that counts what it is asked for, and at one chosen operation dies or says that it is full.

    with shim(folder) as operations: …               every operation under `folder`, in order
    with shim(folder, at=7, act=die): …              SIGKILL in the place of the 7th
    with shim(folder, at=7, act=fails(ENOSPC)): …    the 7th raises OSError, once
    kill_at_each(fresh, act, check)                  a child that is forked for each operation in turn, and killed there

Operations: open (to read or write), write, fsync, mkdir, rename, replace, link, unlink, rmdir, scandir, truncate. A
write is stopped in its middle: half of its bytes have reached the file. Only what lies under `folder` counts, in any
thread.
"""

import builtins
import errno
import io
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

PATH_VERBS = (
    "open",
    "mkdir",
    "rename",
    "replace",
    "link",
    "unlink",
    "remove",
    "rmdir",
    "scandir",
    "listdir",
    "truncate",
)
STORAGE_ERRORS = (errno.ENOSPC, errno.EIO)
MOST = 2000


class Operation(NamedTuple):
    """What was asked for, and of which path relative to the folder."""

    verb: str
    path: str


def die(operation: Operation) -> None:
    """As kill -9, or as a node that loses power with its page cache kept."""
    os.kill(os.getpid(), signal.SIGKILL)


def fails(number: int) -> Callable[[Operation], None]:
    """The operation raises this error of the file system."""

    def act(operation: Operation) -> None:
        raise OSError(number, os.strerror(number), operation.path)

    return act


class _Counting:
    """The operations so far; acts at the one that is chosen."""

    def __init__(self, folder: Path, at: int | None, act: Callable[[Operation], None]) -> None:
        self.folder, self.at, self.act = folder.resolve(), at, act
        self.operations: list[Operation] = []
        self.lock = threading.RLock()

    def note(self, verb: str, path: Any, *, dir_fd: int | None = None, half: Callable[[], None] | None = None) -> None:
        """Count an operation, if it is of the folder; `half`: what has happened of it when it is stopped."""
        where = self.place(path, dir_fd)
        if where is None:
            return
        with self.lock:
            operation = Operation(verb, where)
            self.operations.append(operation)
            if len(self.operations) == self.at:
                if half is not None:
                    half()
                self.act(operation)

    def place(self, path: Any, dir_fd: int | None = None) -> str | None:
        """The path relative to the folder; None for one outside of it."""
        if isinstance(path, int):
            try:
                full = Path(os.readlink(f"/proc/self/fd/{path}"))
            except OSError:
                return None
        else:
            base = Path.cwd() if dir_fd is None else Path(os.readlink(f"/proc/self/fd/{dir_fd}"))
            full = Path(os.path.abspath(base / os.fsdecode(path)))
        return str(full.relative_to(self.folder)) if full.is_relative_to(self.folder) else None


class _File:
    """An open file whose writes are counted."""

    def __init__(self, file: Any, counting: _Counting) -> None:
        self._file, self._counting = file, counting

    def write(self, data: Any) -> Any:
        def half() -> None:
            view = data if isinstance(data, str) else memoryview(data)
            self._file.write(view[: len(view) // 2])
            self._file.flush()

        self._counting.note("write", self._file.fileno(), half=half)
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "_File":
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._file.__exit__(*error)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._file)


@contextmanager
def shim(folder: Path, *, at: int | None = None, act: Callable[[Operation], None] = die) -> Iterator[list[Operation]]:
    """Count the operations under `folder` until the block ends; `act` in the place of the `at`-th, from 1."""
    counting = _Counting(folder, at, act)
    plain = {(os, verb): getattr(os, verb) for verb in (*PATH_VERBS, "fsync", "fdatasync", "write")}
    plain |= {(builtins, "open"): builtins.open, (io, "open"): io.open}
    for (owner, verb), function in plain.items():
        if verb == "open" and owner is not os:
            setattr(owner, verb, _opening(function, counting))
        else:
            setattr(owner, verb, _noting(verb, function, counting))
    try:
        yield counting.operations
    finally:
        for (owner, verb), function in plain.items():
            setattr(owner, verb, function)


def _noting(verb: str, function: Any, counting: _Counting) -> Any:
    said = {"fdatasync": "fsync", "remove": "unlink", "listdir": "scandir"}.get(verb, verb)

    def call(path: Any = ".", *args: Any, **named: Any) -> Any:
        dir_fd = named.get("dir_fd", named.get("src_dir_fd"))
        half = (lambda: function(path, args[0][: len(args[0]) // 2])) if verb == "write" else None
        counting.note(said, path, dir_fd=dir_fd, half=half)
        return function(path, *args, **named)

    return call


def _opening(function: Any, counting: _Counting) -> Any:
    def call(file: Any, mode: str = "r", *args: Any, **named: Any) -> Any:
        if not isinstance(file, int):
            counting.note("open", file)
        opened = function(file, mode, *args, **named)
        writes = any(letter in mode for letter in "wax+")
        return _File(opened, counting) if writes and counting.place(opened.fileno()) is not None else opened

    return call


def kill_at_each(
    fresh: Callable[[int], Path],
    act: Callable[[Path], None],
    check: Callable[[Path, Operation | None], None],
) -> list[Operation]:
    """Fork a child for each operation of `act` and kill it there; returns the operations.

    fresh: the folder that the n-th child works in, made anew. check: looks at what is left, told where the child died;
    None: it was not killed, `act` is done. Raises AssertionError where a child ends in any other way.
    """
    died_at: list[Operation] = []
    for at in range(1, MOST):
        folder = fresh(at)
        operation = _child(folder, act, at)
        check(folder, operation)
        if operation is None:
            return died_at
        died_at.append(operation)
    raise AssertionError(f"more than {MOST} operations")


def _child(folder: Path, act: Callable[[Path], None], at: int) -> Operation | None:
    """Where the child died; None: it came to the end."""
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with shim(folder, at=at, act=lambda operation: _last_word(there, operation)):
                act(folder)
            code = 0
        finally:
            os._exit(code)
    os.close(there)
    with os.fdopen(here) as pipe:
        words = pipe.read().split("\n")
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
        return None
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"a child ended with status {status}"
    return Operation(*words)


def _last_word(pipe: int, operation: Operation) -> None:
    with io.FileIO(pipe, "w", closefd=False) as out:
        out.write("\n".join(operation).encode())
    die(operation)


def fail_at_each(
    fresh: Callable[[int], Path],
    act: Callable[[Path], None],
    check: Callable[[Path, Operation | None, BaseException | None], None],
    *,
    number: int,
) -> list[Operation]:
    """As `kill_at_each`, in this process: each operation in turn raises the error `number` of the file system, once.

    check: told also what `act` raised; None where it raised nothing, which may be right (a clean-up that failed).
    """
    failed: list[Operation] = []
    for at in range(1, MOST):
        folder, raised = fresh(at), None
        with shim(folder, at=at, act=fails(number)) as operations:
            try:
                act(folder)
            except Exception as error:  # handed to `check`
                raised = error
        stopped = operations[at - 1] if len(operations) >= at else None
        check(folder, stopped, raised)
        if stopped is None:
            return failed
        failed.append(stopped)
    raise AssertionError(f"more than {MOST} operations")
