"""Peak of live bytes from the events that torch's profiler notes for every allocation."""

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple


class Allocation(NamedTuple):
    """One event: when, at which address, how many bytes (freed: negative)."""

    at: float
    address: int
    bytes: int


def peak(events: Iterable[Allocation]) -> int:
    """The most bytes that lived at one time, of what the events saw being made."""
    live: dict[int, int] = {}
    held = most = 0
    for event in sorted(events, key=lambda event: event.at):
        held -= live.pop(event.address, 0)
        if event.bytes > 0:
            live[event.address] = event.bytes
            held += event.bytes
        most = max(most, held)
    return most


def allocations(trace: dict[str, Any]) -> list[Allocation]:
    """The allocator's events of a Chrome trace."""
    return [
        Allocation(event["ts"], event["args"]["Addr"], event["args"]["Bytes"])
        for event in trace["traceEvents"]
        if event["name"] == "[memory]"
    ]


def recorded(function: Callable[[], object]) -> dict[str, Any]:
    """The Chrome trace of one call, memory included."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        function()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        run.export_chrome_trace(str(file))
        trace: dict[str, Any] = json.loads(file.read_text())
    return trace


def peak_of(function: Callable[[], object]) -> int:
    """Peak of the bytes that one call makes, and still or no longer holds."""
    return peak(allocations(recorded(function)))
