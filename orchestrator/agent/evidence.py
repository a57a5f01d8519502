"""What a node can still say about a cycle before it is killed: stacks of its ranks, process states, last log lines.

    cycles/0001/evidence/rank-00003.stacks   written by the rank itself (faulthandler on SIGUSR2)
                         rank-00003.pyspy    where the rank did not answer and py-spy is installed and allowed
                         node1.json          states, phases, who answered, the last lines of the node's log

A stopped process (state T) does not run its handlers: its state is recorded first, then the signal is left pending,
then it is continued for at most a second. A process that does not catch SIGUSR2 yet is not signalled, since that would
kill it. The caller kills when `collect` returns.
"""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.agent import proc
from orchestrator.state.codec import dumps
from orchestrator.state.fsio import open_plain, write_atomic

STACKS_WAIT_S = 1.0
HOLD_STOPPED_S = 0.5
_PYSPY_LIMIT_S = 3.0
_LOG_TAIL_BYTES = 16 * 1024
_LOG_LINES = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A rank to be asked, with what its last beat said."""

    rank: int
    pid: int
    phase: str | None
    step: int | None
    collective_seq: int | None
    quiet_s: float
    stacks: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvidence:
    """What one rank showed. `state`: before it was asked. `answer`: where its stacks came from, or why not."""

    rank: int
    pid: int
    state: str | None
    waits_in: str | None
    phase: str | None
    step: int | None
    collective_seq: int | None
    quiet_s: float
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvidence:
    """<node>.json of the evidence folder."""

    schema_version: int = 1
    node: str
    cycle: int
    unix: float
    ranks: tuple[RankEvidence, ...]
    last_lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """`ranks` with what they showed, and every file that holds stacks now."""

    ranks: tuple[RankEvidence, ...]
    files: tuple[Path, ...]

    @property
    def stopped_ranks(self) -> tuple[int, ...]:
        """Ranks that were in state T."""
        return tuple(rank.rank for rank in self.ranks if rank.state == "T")


def collect(suspects: Iterable[Suspect], *, wait_s: float = STACKS_WAIT_S, pyspy: str | None = None) -> Collected:
    """Ask every rank for its stacks; wait at most `wait_s` for those that run, then for those that were stopped."""
    asked = [(suspect, proc.look(suspect.pid), _size(suspect.stacks)) for suspect in suspects]
    waits = {suspect.rank: _wchan(suspect.pid) for suspect, _, _ in asked}
    started = time.monotonic()
    stopped = [row for row in asked if row[1] is not None and row[1].is_stopped]
    _ask_and_wait([row for row in asked if row not in stopped], limit_s=wait_s)
    if stopped:
        # A stopped rank runs on when it is continued, and the others with it: all nodes look at them before that.
        time.sleep(max(0.0, started + HOLD_STOPPED_S - time.monotonic()))
        _ask_and_wait(stopped, limit_s=wait_s)
    ranks, files = [], []
    for suspect, process, size in asked:
        answer = _answer(suspect, process, size, pyspy=pyspy)
        if answer in _FILES:
            files.append(suspect.stacks.with_suffix(_FILES[answer]))
        ranks.append(_evidence(suspect, process, waits[suspect.rank], answer))
    return Collected(ranks=tuple(ranks), files=tuple(files))


_FILES = {"faulthandler": ".stacks", "py-spy": ".pyspy"}


def _evidence(suspect: Suspect, process: proc.Process | None, waits_in: str | None, answer: str) -> RankEvidence:
    return RankEvidence(
        rank=suspect.rank,
        pid=suspect.pid,
        state=None if process is None else process.state,
        waits_in=waits_in,
        phase=suspect.phase,
        step=suspect.step,
        collective_seq=suspect.collective_seq,
        quiet_s=round(suspect.quiet_s, 3),
        answer=answer,
    )


def _ask_and_wait(rows: Sequence[tuple[Suspect, proc.Process | None, int]], *, limit_s: float) -> None:
    """Ask these ranks, then wait until every one that could be asked has written more than before."""
    signalled = [row for row in rows if row[1] is not None and _ask(row[1])]
    if signalled:
        _wait_for(lambda: all(_grown(suspect.stacks, size) for suspect, _, size in signalled), limit_s=limit_s)


def _ask(process: proc.Process) -> bool:
    """Send the dump signal; a stopped process is continued after it, so that the dump is the first thing it does."""
    if process.is_dead or not _catches(process.pid, signal.SIGUSR2):
        return False
    sent = proc.send(process, signal.SIGUSR2)
    if process.is_stopped:
        proc.send(process, signal.SIGCONT)
    return sent


def _answer(suspect: Suspect, process: proc.Process | None, size: int, *, pyspy: str | None) -> str:
    if _grown(suspect.stacks, size):
        return "faulthandler"
    if process is None or process.is_dead:
        return "the process was gone"
    if pyspy is not None and _pyspy(pyspy, suspect.pid, suspect.stacks.with_suffix(".pyspy")):
        return "py-spy"
    return "no answer"


def _pyspy(program: str, pid: int, path: Path) -> bool:
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            timeout=_PYSPY_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    if done.returncode != 0 or not done.stdout:
        return False
    path.write_bytes(done.stdout)
    return True


def find_pyspy() -> str | None:
    """py-spy beside this Python or on PATH, None where it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _catches(pid: int, number: signal.Signals) -> bool:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (number - 1) & 1)


def _wchan(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/wchan").read_text() or None
    except OSError:
        return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _grown(path: Path, before: int) -> bool:
    return _size(path) > before


def _wait_for(done: Callable[[], bool], *, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not done() and time.monotonic() < deadline:
        time.sleep(0.02)
    # A dump is written line by line: give the last one a moment to end.
    time.sleep(0.05)


def last_lines(path: Path) -> tuple[str, ...]:
    """The end of a log: at most 60 lines of at most 16 KiB; () when it cannot be read."""
    try:
        with open_plain(path) as file:
            file.seek(max(0, _size(path) - _LOG_TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ()
    return tuple(text.splitlines()[-_LOG_LINES:])


def write(path: Path, evidence: NodeEvidence) -> None:
    """Leave the node's evidence file. Raises OSError."""
    write_atomic(path, dumps(evidence, indent=1), durable=False)
