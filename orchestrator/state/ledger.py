"""The ledger: what happened, append-only, one file per writer, merged by (epoch, seq, writer) and never by wall clock.

`seq` is a Lamport counter: a writer starts above the highest seq it can see and counts on, so that an event written
after another was read sorts behind it, whatever the clocks of their machines say. A torn last line is the trace of a
crash and is ignored; anything else that cannot be read is reported, never dropped in silence.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.control.clock import Clock, SystemClock
from orchestrator.state.epochs import Epoch
from orchestrator.state.fsio import append_line, list_names, read_text
from orchestrator.state.records import SCHEMA_VERSION, Event, Unreadable, parse_event
from orchestrator.state.rundir import RunPaths


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerView:
    """The merged events. `problems`: lines that are none; `unread`: files or folders that could not be read at all.

    A bad line is the scar of a crash and hides at most one event; an unread file hides everything a writer said.
    """

    events: tuple[Event, ...] = ()
    problems: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


def event_line(event: Event) -> str:
    """The line of an event, without newline. Raises ValueError for NaN and infinities."""
    return json.dumps(
        {
            "schema_version": event.schema_version,
            "epoch": event.epoch.to_list(),
            "seq": event.seq,
            "writer": event.writer,
            "unix": event.unix,
            "kind": event.kind,
            "data": event.data,
        },
        allow_nan=False,
        ensure_ascii=False,
    )


def parse_lines(text: str, *, name: str) -> LedgerView:
    """Events of one writer's file. The last line counts only when it ends in a newline."""
    lines = text.split("\n")
    events: list[Event] = []
    problems: list[str] = []
    for number, line in enumerate(lines[:-1], start=1):
        event = parse_event(line)
        if isinstance(event, Unreadable):
            problems.append(f"{name}:{number}: {event.why}")
        else:
            events.append(event)
    return LedgerView(events=tuple(events), problems=tuple(problems))


def merge(views: tuple[LedgerView, ...]) -> LedgerView:
    """All events in order; the same (epoch, seq, writer) twice counts once."""
    by_order = {event.order: event for view in views for event in view.events}
    events = tuple(by_order[order] for order in sorted(by_order))
    return LedgerView(
        events=events,
        problems=tuple(problem for view in views for problem in view.problems),
        unread=tuple(name for view in views for name in view.unread),
    )


def read(run_dir: Path) -> LedgerView:
    """The whole ledger of a run; an unreadable file or folder is reported, not an empty ledger."""
    folder = RunPaths(run_dir).ledger
    names = list_names(folder)
    if not names and not folder.is_dir():
        # Every run is made with this folder: without it nothing is known, which is not "nothing happened".
        return LedgerView(unread=("ledger/: the folder is missing",))
    if names is None:
        return LedgerView(unread=("ledger/: cannot be listed",))
    views = []
    for name in names:
        if not name.endswith(".jsonl"):
            continue
        text = read_text(folder / name)
        if text is None:
            views.append(LedgerView(unread=(f"ledger/{name}: cannot be read",)))
        else:
            views.append(parse_lines(text, name=name))
    return merge(tuple(views))


def read_all(run_dir: Path) -> tuple[Event, ...]:
    """The merged events of a run (see `read` for what could not be read)."""
    return read(run_dir).events


def latest_epoch(events: tuple[Event, ...]) -> Epoch:
    """The highest epoch so far, (0, 0, 0) before any attempt: where a person's act is filed."""
    return max((event.epoch for event in events), default=Epoch(0, 0, 0))


class Ledger:
    """One writer's file. Not shared between threads; appending costs one fsync."""

    def __init__(self, path: Path, writer: str, *, clock: Clock | None = None) -> None:
        """`path` is the run directory."""
        self.run_dir = path
        self.writer = writer
        self._clock: Clock = clock or SystemClock()
        self._seq = 0
        self.saw(read_all(path))

    def saw(self, events: tuple[Event, ...]) -> None:
        """Later events of this writer sort behind these (within their epoch)."""
        self._seq = max(self._seq, max((event.seq for event in events), default=0))

    def append(self, epoch: Epoch, kind: str, data: Mapping[str, Any]) -> Event:
        """Add a fact and return it. Raises OSError (no space, lost mount) and ValueError (not JSON)."""
        event = Event(
            schema_version=SCHEMA_VERSION,
            epoch=epoch,
            seq=self._seq + 1,
            writer=self.writer,
            unix=self._clock.now_unix(),
            kind=kind,
            data=dict(data),
        )
        append_line(RunPaths(self.run_dir).ledger_file(self.writer), event_line(event))
        self._seq += 1
        return event
