"""Processes of a run, found in /proc by the environment they were started with: never by name, never of another user.

Every process of an attempt carries PAWL_NONCE, and everything of a node PAWL_NODE, from the exec that started it. That
survives re-parenting, new sessions and process groups (torchrun gives each worker its own session). A zombie is dead:
it holds nothing but its exit status. Signals go through a pidfd, after the start time was compared, so a recycled pid
is never hit.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import PawlError

NONCE_KEY = "PAWL_NONCE"
NODE_KEY = "PAWL_NODE"
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process at the moment it was looked at. `state` is the kernel's letter: R S D T t Z X I."""

    pid: int
    ppid: int
    state: str
    start_ticks: int

    @property
    def is_dead(self) -> bool:
        """A zombie, or being removed."""
        return self.state in "ZX"

    @property
    def is_stopped(self) -> bool:
        """Stopped by a signal (T). A tracing stop (t, a debugger) is not meant."""
        return self.state == "T"


def look(pid: int) -> Process | None:
    """The process, or None when there is none with this pid."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name stands in parentheses and may hold anything, also ")" and spaces.
    fields = text.rpartition(")")[2].split()
    return Process(pid=pid, state=fields[0], ppid=int(fields[1]), start_ticks=int(fields[19]))


def is_alive(pid: int, start_ticks: int | None = None) -> bool:
    """Whether this very process still runs. Zombies are dead; so is another process under the same number."""
    process = look(pid)
    if process is None or process.is_dead:
        return False
    return start_ticks is None or process.start_ticks == start_ticks


def boot_id() -> str:
    """Names this boot of this machine: pids and start ticks mean nothing across two boots."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def own_start_ticks() -> int:
    """When this process started, in clock ticks since the boot."""
    process = look(os.getpid())
    if process is None:
        raise PawlError("/proc does not show this very process. pawl needs /proc mounted for its own user.")
    return process.start_ticks


def find(*, nonce: str, node: str | None = None) -> tuple[Process, ...]:
    """Live processes of this user whose environment holds this nonce (and node), except this process itself."""
    wanted = [f"{NONCE_KEY}={nonce}".encode()]
    if node is not None:
        wanted.append(f"{NODE_KEY}={node}".encode())
    return tuple(_matching(wanted))


def _matching(wanted: list[bytes]) -> Iterator[Process]:
    uid, own = os.getuid(), os.getpid()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == own:
            continue
        try:
            if entry.stat().st_uid != uid:
                continue
            environment = (entry / "environ").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if all(item in environment for item in wanted):
            process = look(int(entry.name))
            if process is not None and not process.is_dead:
                yield process


def send(process: Process, number: signal.Signals) -> bool:
    """Signal exactly this process; False when it is gone already."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        now = look(process.pid)
        if now is None or now.is_dead or now.start_ticks != process.start_ticks:
            return False
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """What a kill did. `remaining`: processes that SIGKILL did not end in time (state D: waiting for a device)."""

    signalled: int
    remaining: tuple[Process, ...]


def kill_all(search: Callable[[], tuple[Process, ...]], *, limit_s: float = 5.0) -> Killed:
    """SIGKILL everything that `search` finds, again and again until it finds nothing or `limit_s` is over.

    Searching again catches children that were forked while their parents died.
    """
    deadline = time.monotonic() + limit_s
    seen: set[tuple[int, int]] = set()
    while left := search():
        for process in left:
            if send(process, signal.SIGKILL):
                seen.add((process.pid, process.start_ticks))
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return Killed(signalled=len(seen), remaining=left)


def become_subreaper() -> None:
    """Orphaned descendants become children of this process instead of init's, so that it can reap and count them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise PawlError(f"prctl(PR_SET_CHILD_SUBREAPER) failed: {os.strerror(number)}. pawl needs Linux 3.4 or newer.")


def reap(keep: frozenset[int] = frozenset()) -> int:
    """Collect dead children and adopted orphans, except those in `keep` (their owner waits for them)."""
    count = 0
    with contextlib.suppress(ChildProcessError):
        # WNOWAIT looks first: a child of a Popen must keep its status for that Popen.
        while (info := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if info.si_pid in keep:
                break
            os.waitpid(info.si_pid, os.WNOHANG)
            count += 1
    return count
