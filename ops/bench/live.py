"""Peak of live bytes from the events that torch's profiler notes for every allocation."""

import json
import tempfile
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

SETTLES_S = 0.002


class Allocation(NamedTuple):
    """One event: when, at which address, how many bytes (freed: negative)."""

    at: float
    address: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Lived:
    """The most bytes that lived at one time, and those that live at the end, of what the events saw being made."""

    peak: int
    left: int


def lived(events: Iterable[Allocation]) -> Lived:
    """Plays the events. What is made where something lay says that it is gone, though no event told of it."""
    live: dict[int, int] = {}
    starts: list[int] = []  # sorted
    held = most = 0

    def drop(address: int) -> int:
        starts.remove(address)
        return live.pop(address)

    for event in sorted(events, key=lambda event: event.at):
        if event.bytes < 0:
            held -= drop(event.address) if event.address in live else 0
            continue
        below = bisect_left(starts, event.address)
        covered = [at for at in starts[max(0, below - 1) : below] if at + live[at] > event.address]
        covered += takewhile(lambda at: at < event.address + event.bytes, starts[below:])  # noqa: B023 (used at once)
        held += event.bytes - sum([drop(at) for at in covered])
        live[event.address] = event.bytes
        insort(starts, event.address)
        most = max(most, held)
    return Lived(peak=most, left=held)


def allocations(trace: dict[str, Any]) -> list[Allocation]:
    """The allocator's events of a Chrome trace."""
    return [
        Allocation(event["ts"], event["args"]["Addr"], event["args"]["Bytes"])
        for event in trace["traceEvents"]
        if event["name"] == "[memory]"
    ]


def recorded(function: Callable[[], object]) -> dict[str, Any]:
    """The Chrome trace of one call, memory included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        function()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        run.export_chrome_trace(str(file))
        trace: dict[str, Any] = json.loads(file.read_text())
    return trace


def lived_in(function: Callable[[], object]) -> Lived:
    """Of what one call makes."""
    return lived(allocations(recorded(function)))


@contextmanager
def settled() -> Iterator[None]:
    """Waits for messages a moment longer. The thread that carries them lets go of their tensors just after it has said
    that it is done, and of what it is the last to let go no event tells."""
    wait = dist.Work.wait

    def longer(work: dist.Work, *args: Any) -> Any:
        done = wait(work, *args)
        time.sleep(SETTLES_S)
        return done

    dist.Work.wait = longer  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        dist.Work.wait = wait  # type: ignore[method-assign]
