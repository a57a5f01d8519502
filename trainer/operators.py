"""Which operators took the time of a trace: Chrome's trace events in, a table out. Pure.

The time of an event less that of the events inside it is its own; on one thread events nest. Kernels of an accelerator
hold nothing, and where there are any, they are what is waited for: then the table is theirs.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
ON_CPU = frozenset({"cpu_op", "user_annotation"})
SHOWN = 40


@dataclass(slots=True, kw_only=True)
class Operator:
    """What all calls of one name took together, in µs: without and with the events inside."""

    name: str
    calls: int = 0
    own_us: float = 0.0
    whole_us: float = 0.0


def operators(events: Iterable[Mapping[str, Any]]) -> tuple[list[Operator], bool]:
    """(the operators, most own time first; whether they are the accelerator's). Other kinds of events are left out."""
    spans = [event for event in events if event.get("ph") == "X" and event.get("cat") in ON_DEVICE | ON_CPU]
    on_device = any(span["cat"] in ON_DEVICE for span in spans)
    lanes: dict[tuple[Any, Any], list[Mapping[str, Any]]] = defaultdict(list)
    for span in spans:
        if (span["cat"] in ON_DEVICE) is on_device:
            lanes[span.get("pid"), span.get("tid")].append(span)
    found: dict[str, Operator] = {}
    for lane in lanes.values():
        _add_up(sorted(lane, key=lambda span: (span["ts"], -span["dur"])), found)
    return sorted(found.values(), key=lambda each: (-each.own_us, each.name)), on_device


def _add_up(lane: Sequence[Mapping[str, Any]], found: dict[str, Operator]) -> None:
    """Add the spans of one thread, in order of their start, the outer one first."""
    around: list[tuple[float, Operator]] = []
    for span in lane:
        start, duration = float(span["ts"]), float(span["dur"])
        while around and around[-1][0] <= start:
            around.pop()
        operator = found.setdefault(span["name"], Operator(name=span["name"]))
        operator.calls += 1
        operator.own_us += duration
        operator.whole_us += duration
        if around:
            around[-1][1].own_us -= duration
        around.append((start + duration, operator))


def table(title: str, events: Iterable[Mapping[str, Any]]) -> str:
    """The operators as text; times in ms."""
    rows, on_device = operators(events)
    total = sum(row.own_us for row in rows) or 1.0
    lines = [
        f"{title}, time on the {'accelerator' if on_device else 'CPU'}",
        f"{'own ms':>12} {'share':>6} {'with inner ms':>14} {'calls':>9}  operator",
    ]
    lines += [
        f"{row.own_us / 1e3:12.3f} {row.own_us / total:6.1%} {row.whole_us / 1e3:14.3f} {row.calls:9d}  {row.name}"
        for row in rows[:SHOWN]
    ]
    if rest := rows[SHOWN:]:
        lines.append(f"and {len(rest)} more with {sum(row.own_us for row in rest) / total:.1%} of the time")
    return "\n".join(lines) + "\n"
