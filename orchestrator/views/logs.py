"""`pawl logs`: the output of all nodes over all cycles, merged, identical lines folded.

    attempts/N/cycles/M/logs/<node>.log  ──▶  a0001c0002 node1  [rank2]: loading …  ×3

Lines carry no clock of their own, so the order is: cycle after cycle; inside one, each node's file in turn when it is
over, and as lines arrive when followed. A line that follows itself, or that all nodes say at the same point, is printed
once with ×N. `rank` keeps the lines that name it ("[rank3]", "[default3]:", "rank 3 …", "rank=3").
"""

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import PawlError
from orchestrator.state.fsio import list_names
from orchestrator.state.rundir import RunPaths
from orchestrator.views.read import numbers

POLL_S = 0.5
MAX_LINE = 8192
_RANK = re.compile(r"\[(?:rank|default|Rank )(\d+)\]|\brank[ =](\d+)\b", re.IGNORECASE)
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line with where it comes from: "a0001c0002 node1"."""

    source: str
    text: str


@dataclass(frozen=True, slots=True)
class Folded:
    """A line and how often it came in a row; several sources when more than one said it."""

    sources: tuple[str, ...]
    text: str
    times: int


def fold(lines: Iterable[LogLine]) -> Iterator[Folded]:
    """Runs of identical text become one line. Lazy: a line is out when another one follows."""
    held: list[LogLine] = []
    for line in lines:
        if held and line.text != held[0].text:
            yield _folded(held)
            held = []
        held.append(line)
    if held:
        yield _folded(held)


def _folded(lines: list[LogLine]) -> Folded:
    return Folded(tuple(dict.fromkeys(line.source for line in lines)), lines[0].text, len(lines))


def of_rank(line: str) -> int | None:
    """The rank that a line names; None when it names none."""
    match = _RANK.search(line)
    return None if match is None else int(match.group(1) or match.group(2))


def clean(line: str) -> str:
    """A line as it may be printed: no control sequences, of which a terminal might obey some; not longer than 8 KiB."""
    return _CONTROL.sub("", line.rstrip("\r\n").rpartition("\r")[2])[:MAX_LINE]


def show(line: Folded) -> str:
    """The line as printed."""
    where = line.sources[0] if len(line.sources) == 1 else f"{line.sources[0]} +{len(line.sources) - 1}"
    return f"{where}  {line.text}" + (f"  ×{line.times}" if line.times > 1 else "")


class _Tail:
    """New whole lines of one file; a torn last line waits for its line feed."""

    def __init__(self, path: Path, source: str) -> None:
        self.path, self.source = path, source
        self._offset = 0

    def read(self, *, final: bool) -> list[LogLine]:
        """Lines since the last call. `final`: the end of the file ends the last line too."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        whole = data if final else data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        text = whole.decode("utf-8", "replace")
        return [LogLine(self.source, clean(line)) for line in text.split("\n") if line.strip()]


def log_files(run_dir: Path) -> tuple[tuple[str, Path], ...]:
    """(source, path) of every node's log, cycle after cycle."""
    paths = RunPaths(run_dir)
    found = []
    for attempt in numbers(paths.attempts):
        for cycle in numbers(paths.cycles(attempt)):
            folder = paths.logs(attempt, cycle)
            for name in list_names(folder) or ():
                if name.endswith(".log"):
                    found.append((f"a{attempt:04d}c{cycle:04d} {name.removesuffix('.log')}", folder / name))
    return tuple(found)


def read_lines(run_dir: Path, *, rank: int | None = None) -> Iterator[LogLine]:
    """All lines there are now."""
    for source, path in log_files(run_dir):
        yield from _kept(_Tail(path, source).read(final=True), rank)


def _kept(lines: Iterable[LogLine], rank: int | None) -> Iterator[LogLine]:
    return (line for line in lines if rank is None or of_rank(line.text) == rank)


def run(
    run_dir: Path,
    *,
    follow: bool = False,
    rank: int | None = None,
    write: Callable[[str], object] | None = None,
    is_over: Callable[[], bool] | None = None,
) -> int:
    """Print the logs; with `follow` until the run is over (or Ctrl-C, which raises KeyboardInterrupt). Returns 0.

    Raises PawlError when the run has no logs and none are awaited.
    """
    out = write or _print
    if not follow:
        shown = 0
        for line in fold(read_lines(run_dir, rank=rank)):
            out(show(line))
            shown += 1
        if not shown:
            what = "has no output yet" if rank is None else f"has no output that names rank {rank}"
            raise PawlError(f"Run {run_dir.name} {what}. Its supervisor's own words: attempts/*/supervisor.log there.")
        return 0
    _follow(run_dir, rank=rank, out=out, is_over=is_over or (lambda: _run_is_over(run_dir)))
    return 0


def _follow(run_dir: Path, *, rank: int | None, out: Callable[[str], object], is_over: Callable[[], bool]) -> None:
    tails: dict[Path, _Tail] = {}
    while True:
        ended = is_over()
        for source, path in log_files(run_dir):
            tails.setdefault(path, _Tail(path, source))
        fresh = [line for tail in tails.values() for line in _kept(tail.read(final=ended), rank)]
        for line in fold(fresh):
            out(show(line))
        if ended:
            return
        time.sleep(POLL_S)


def _run_is_over(run_dir: Path) -> bool:
    from orchestrator.views.run_view import run_view

    return run_view(run_dir).state.is_over


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
