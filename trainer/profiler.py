"""Steps recorded as traces: which operator ran when, on which ranks, for how long.

    profiler: in the config ─┐             RUN/profile/step-000000010.a0001g01c0001/
    pawl profile RUN ────────┴▶ Window ─▶     rank-00000.json.gz    the trace, for ui.perfetto.dev or chrome://tracing
                                              rank-00000.txt        the operators that took most time

Recording reads clocks and changes no number. A trace that cannot be made or written costs a warning, never the run.
While some ranks begin or write all wait, in phase SAVE: a step limit would take the waiting ones for hung.
"""

import gzip
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from trainer.beat import BeatWriter, Phase
from trainer.config.model import Profiler
from trainer.fsio import write_atomic
from trainer.operators import table

COMPRESSION = 3  # of 9: a third larger than the best, five times as fast, and all ranks wait for it
MAX_ADDED_UP_BYTES = 1 << 29  # as JSON; read into Python it takes some ten times that


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Steps to record, counted from 1. The same on all ranks but for `records`: whether this one does."""

    first_step: int
    num_steps: int
    records: bool

    @property
    def last_step(self) -> int:
        return self.first_step + self.num_steps - 1

    def __contains__(self, step: int) -> bool:
        return self.first_step <= step <= self.last_step

    def from_step(self, step: int) -> "Window":
        """What is left of it from a step inside on: a resume may begin in the middle."""
        return replace(self, first_step=step, num_steps=self.last_step - step + 1)


def planned_window(config: Profiler | None, rank: int) -> Window | None:
    """The window of the config's section."""
    if config is None:
        return None
    records = config.ranks == "all" or rank in config.ranks
    return Window(first_step=config.first_step, num_steps=config.num_steps, records=records)


def folder_name(window: Window, epoch_text: str) -> str:
    """For example step-000000010.a0001g01c0001: the first step and the launch, as a checkpoint is named."""
    return f"step-{window.first_step:09d}.{epoch_text}"


class Recording(Protocol):
    """A recording under way."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def export_chrome_trace(self, path: str) -> Any: ...


def record(config: Profiler) -> Recording:
    """A recorder of all this machine has: CPU, and the accelerator where there is one."""
    return torch.profiler.profile(
        record_shapes=config.record_shapes,
        profile_memory=config.profile_memory,
        with_stack=config.with_stack,
    )


class StepProfiler:
    """The windows of one rank. A context manager: a window that the end of the run cuts short is written too.

    folder: where windows are written. wait: waits for all ranks. recorder: makes a recording.
    """

    def __init__(
        self, config: Profiler | None, *, rank: int, epoch_text: str, folder: Path, beats: BeatWriter,
        wait: Callable[[], object], recorder: Callable[[Profiler], Recording] = record,
    ) -> None:  # fmt: skip
        self._config, self._planned = config or Profiler(), planned_window(config, rank)
        self._rank, self._epoch_text, self._folder = rank, epoch_text, folder
        self._beats, self._wait, self._recorder = beats, wait, recorder
        self._window: Window | None = None
        self._recording: Recording | None = None
        self._answering = self._acked = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._end()
        elif self._recording is not None:
            self._try(self._recording.stop, "ended")
        self._window = self._recording = None

    def wish(self) -> int:
        """Steps that the agent asks to record and this rank has not: 0 while there are none, or a window is on."""
        seq, steps, _ = self._beats.profile_request()
        return steps if seq > self._acked and self._window is None else 0

    def agree(self, step: int, num_steps: int) -> None:
        """All ranks know of the wish: its window begins after `step`. Does nothing for 0 steps."""
        if num_steps:
            self._answering, _, records = self._beats.profile_request()
            self._window = Window(first_step=step + 1, num_steps=num_steps, records=records)

    def covers(self, step: int) -> bool:
        """Whether a step lies in a window; equal on all ranks."""
        return any(window is not None and step in window for window in (self._window, self._planned))

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around a step: begins what is due, and marks the step in the trace. Comm: see `wait`, at a window's first."""
        if self._window is None and self._planned is not None and step in self._planned:
            self._window = self._planned.from_step(step)
        if self._window is not None and step == self._window.first_step:
            self._begin(self._window)
        with ExitStack() as stack:
            if self._recording is not None:
                stack.enter_context(_mark(step))
            yield

    def finish(self, step: int) -> None:
        """After a step and all that belongs to it: writes the window that ends with it. Comm: see `wait`, then."""
        if self._window is not None and step >= self._window.last_step:
            self._end()

    def _begin(self, window: Window) -> None:
        """Comm: see `wait`. A process's first recorder takes seconds to come up, more than a short step may last."""
        self._beats.beat(Phase.SAVE)
        if window.records:
            self._try(self._start, "begun")
        self._wait()

    def _start(self) -> None:
        recording = self._recorder(self._config)
        recording.start()
        self._recording = recording

    def _end(self) -> None:
        window, recording = self._window, self._recording
        if window is None:
            return
        self._beats.beat(Phase.SAVE)
        if recording is not None and self._try(recording.stop, "ended"):
            self._try(lambda: self._write(window, recording), "written")
        self._window = self._recording = None
        self._wait()
        self._acked = max(self._acked, self._answering)
        self._beats.beat(profile_ack=self._acked)

    def _write(self, window: Window, recording: Recording) -> None:
        folder = self._folder / folder_name(window, self._epoch_text)
        # No parents: a run directory that was removed must not come back as a stump.
        self._folder.mkdir(mode=0o750, exist_ok=True)
        folder.mkdir(mode=0o750, exist_ok=True)
        path = folder / f"rank-{self._rank:05d}.json.gz"
        write_trace(recording, path, title=f"rank {self._rank}, steps {window.first_step} to {window.last_step}")
        print(f"rank {self._rank}: recorded: {path}", flush=True)

    def _try(self, act: Callable[[], object], what: str) -> bool:
        """Whether it worked. What goes wrong in a recorder or on a full disk is told, and stops nothing."""
        try:
            act()
        except Exception as error:
            window = self._window
            steps = "" if window is None else f" of steps {window.first_step} to {window.last_step}"
            print(
                f"rank {self._rank}: the trace{steps} could not be {what} ({type(error).__name__}: {error}; folder "
                f"{self._folder}). Training goes on; `pawl profile` asks for another one.",
                file=sys.stderr,
                flush=True,
            )
            return False
        return True


def _mark(step: int) -> AbstractContextManager[Any]:
    return torch.profiler.record_function(f"step {step}")


def write_trace(recording: Recording, path: Path, *, title: str) -> None:
    """The trace as gzip at `path`, whole or not at all, and beside it the table of its operators. Raises OSError, also
    where the recorder kept it to itself that the disk is full, and ValueError.
    """
    raw, packed = path.with_name(f".{path.stem}"), path.with_name(f".{path.name}")
    try:
        recording.export_chrome_trace(str(raw))
        with raw.open("rb") as source, gzip.open(packed, "wb", compresslevel=COMPRESSION) as target:
            size = source.seek(0, os.SEEK_END)
            source.seek(max(0, size - 2))
            # It is written from C++, which does not say when a disk is full.
            if not source.read().strip().endswith(b"}"):
                raise OSError(f"{raw} is cut off: is the disk full?")
            source.seek(0)
            shutil.copyfileobj(source, target, 1 << 20)
        packed.replace(path)
        text = f"{title}: the trace is too large to be added up\n"
        if size <= MAX_ADDED_UP_BYTES:
            text = table(title, json.loads(raw.read_bytes())["traceEvents"])
        write_atomic(path.with_name(path.name.replace(".json.gz", ".txt")), text)
    finally:
        raw.unlink(missing_ok=True)
        packed.unlink(missing_ok=True)
