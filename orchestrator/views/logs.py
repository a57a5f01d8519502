"""`pawl logs`: the output of all ranks over all cycles, merged, identical lines folded.

    attempts/N/cycles/M/logs/<node>.log  ──▶  a0001c0002 node1 ranks 2-3  loading …  ×2

Each line of a rank begins with its number ("[rank3]: …", written by the agent's labeller); torchrun's own lines have
none. Lines carry no clock, so the order is: cycle after cycle; inside one, each node's file in turn when it is over,
and as lines arrive when followed. The same line of several ranks, or of one rank in a row, is printed once with ×N
where the order of every rank's own lines allows it. `rank` keeps the lines of one rank, and those without a number that
name it ("rank 3 …").
"""

import re
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.errors import PawlError, UsageError
from orchestrator.state.fsio import list_names, open_plain, read_text
from orchestrator.state.records import LaunchFacts, parse_launch_facts
from orchestrator.state.rundir import RunPaths
from orchestrator.views.human import harmless, plural
from orchestrator.views.read import numbers

POLL_S = 0.5
MAX_LINE = 8192
# How many lines back the same line of another rank is looked for.
WINDOW = 200
_LABEL = re.compile(r"\[rank(\d+)\]:? ?")
_RANK = re.compile(r"\[(?:rank|default|Rank )(\d+)\]|\brank[ =](\d+)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line with where it comes from: cycle "a0001c0002", node, and the rank that wrote it, if it says so."""

    cycle: str
    node: str
    rank: int | None
    text: str


@dataclass(slots=True)
class Folded:
    """A line, who said it, and how often it came."""

    cycle: str
    text: str
    nodes: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    times: int = 0


def fold(lines: Iterable[LogLine]) -> Iterator[Folded]:
    """The same text of one cycle becomes one line, within WINDOW lines; each rank's own order is kept. Lazy."""
    held: dict[int, Folded] = {}
    places: dict[tuple[str, str], list[int]] = {}
    last: dict[tuple[str, int | None], int] = {}
    number = 0
    for line in lines:
        source, key = (line.node, line.rank), (line.cycle, line.text)
        known = places.setdefault(key, [])
        # The first place that is not before this rank's line before.
        at = bisect_left(known, last.get(source, -1))
        if at == len(known):
            known.append(number)
            held[number] = Folded(*key)
            number += 1
        last[source] = known[at]
        _add(held[known[at]], line)
        if len(held) > WINDOW:
            oldest = next(iter(held))
            done = held.pop(oldest)
            places[done.cycle, done.text].remove(oldest)
            if not places[done.cycle, done.text]:
                del places[done.cycle, done.text]
            yield done
    yield from held.values()


def _add(entry: Folded, line: LogLine) -> None:
    entry.times += 1
    if line.node not in entry.nodes:
        entry.nodes.append(line.node)
    if line.rank is not None and line.rank not in entry.ranks:
        entry.ranks.append(line.rank)


def of_rank(line: str) -> int | None:
    """The rank that a line without a label names; None when it names none."""
    match = _RANK.search(line)
    return None if match is None else int(match.group(1) or match.group(2))


def parse_line(raw: str, *, cycle: str, node: str) -> LogLine:
    """A line of a node's log without its label, as it may be printed: harmless, its last picture, at most 8 KiB."""
    text = raw.rstrip("\r\n")
    label = _LABEL.match(text)
    rest = text if label is None else text[label.end() :]
    shown = harmless(rest.rpartition("\r")[2])[:MAX_LINE]
    return LogLine(cycle, node, None if label is None else int(label.group(1)), shown)


def ranges(numbers: Iterable[int]) -> str:
    """0-3,5"""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def show(line: Folded) -> str:
    """The line as printed."""
    where = f"{line.cycle} {line.nodes[0]}" + (f" +{len(line.nodes) - 1}" if len(line.nodes) > 1 else "")
    if line.ranks:
        where += f" rank{'s' if len(line.ranks) > 1 else ''} {ranges(line.ranks)}"
    return f"{where}  {line.text}" + (f"  ×{line.times}" if line.times > 1 else "")


class _Tail:
    """New whole lines of one file; a torn last line waits for its line feed."""

    def __init__(self, path: Path, *, cycle: str, node: str) -> None:
        self.path, self.cycle, self.node = path, cycle, node
        self._offset = 0

    def read(self, *, final: bool) -> list[LogLine]:
        """Lines since the last call. `final`: the end of the file ends the last line too."""
        try:
            with open_plain(self.path) as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        whole = data if final else data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        text = whole.decode("utf-8", "replace")
        found = (parse_line(line, cycle=self.cycle, node=self.node) for line in text.split("\n"))
        return [line for line in found if line.text.strip()]


def log_files(run_dir: Path) -> tuple[tuple[str, str, Path], ...]:
    """(cycle, node, path) of every node's log, cycle after cycle."""
    paths = RunPaths(run_dir)
    found = []
    for attempt in numbers(paths.attempts):
        for cycle in numbers(paths.cycles(attempt)):
            folder = paths.logs(attempt, cycle)
            for name in list_names(folder) or ():
                if name.endswith(".log"):
                    found.append((f"a{attempt:04d}c{cycle:04d}", name.removesuffix(".log"), folder / name))
    return tuple(found)


def read_lines(run_dir: Path, *, rank: int | None = None) -> Iterator[LogLine]:
    """All lines there are now."""
    for cycle, node, path in log_files(run_dir):
        yield from _kept(_Tail(path, cycle=cycle, node=node).read(final=True), rank)


def _kept(lines: Iterable[LogLine], rank: int | None) -> Iterator[LogLine]:
    return (line for line in lines if rank is None or _is_of(line, rank))


def _is_of(line: LogLine, rank: int) -> bool:
    return line.rank == rank if line.rank is not None else of_rank(line.text) == rank


def run(
    run_dir: Path,
    *,
    follow: bool = False,
    rank: int | None = None,
    write: Callable[[str], object] | None = None,
    is_over: Callable[[], bool] | None = None,
) -> int:
    """Print the logs; with `follow` until the run is over (or Ctrl-C, which raises KeyboardInterrupt). Returns 0.

    Raises UsageError for a rank that the run does not have, PawlError when it has no logs and none are awaited.
    """
    out = write or _print
    _check_rank(run_dir, rank)
    if not follow:
        shown = 0
        for line in fold(read_lines(run_dir, rank=rank)):
            out(show(line))
            shown += 1
        if not shown:
            what = "has no output yet" if rank is None else f"has no output of rank {rank} yet"
            raise PawlError(f"Run {run_dir.name} {what}. Its supervisor's own words: attempts/*/supervisor.log there.")
        return 0
    _follow(run_dir, rank=rank, out=out, is_over=is_over or (lambda: _run_is_over(run_dir)))
    return 0


def _check_rank(run_dir: Path, rank: int | None) -> None:
    facts = parse_launch_facts(read_text(RunPaths(run_dir).launch_facts))
    if rank is not None and isinstance(facts, LaunchFacts) and rank >= facts.world_size:
        raise UsageError(f"--rank {rank}: run {run_dir.name} has {plural(facts.world_size, 'rank')}, numbered from 0.")


def _follow(run_dir: Path, *, rank: int | None, out: Callable[[str], object], is_over: Callable[[], bool]) -> None:
    tails: dict[Path, _Tail] = {}
    while True:
        ended = is_over()
        for cycle, node, path in log_files(run_dir):
            tails.setdefault(path, _Tail(path, cycle=cycle, node=node))
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
