"""What the loop does about checkpoints: begins them, learns at a later border how they went, and counts.

SAVE is due ─ one under way? ─ wait for it, and say so ─▶ begin ─┬─ asked for, or the last: wait until it is committed
                                                                 └─ else train on; `collect` at an agreed border
"""

import logging
import time
from collections.abc import Callable
from typing import Protocol

from trainer.beat import BeatWriter, Phase
from trainer.checkpoint.state import RunState
from trainer.checkpoint.together import SaveFailed

_log = logging.getLogger(__name__)


class SavedLike(Protocol):
    """What a committed save says: the checkpoint's name, step and size, and when it was committed (Unix seconds)."""

    @property
    def name(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def unix(self) -> float: ...


class SaverLike(Protocol):
    """What writes checkpoints (`trainer/checkpoint/saver.py`)."""

    @property
    def is_async(self) -> bool: ...
    @property
    def step(self) -> int | None: ...
    def is_done(self) -> bool: ...
    def start(self, state: RunState, before_commit: Callable[[], None], *, waits: bool) -> None: ...
    def collect(self) -> SavedLike: ...


class Saves:
    """The saves of one loop. `committed` is told of each; `say` gets a line for a person."""

    def __init__(
        self, saver: SaverLike, beats: BeatWriter, *, committed: Callable[[str], None], say: Callable[[str], None]
    ) -> None:
        self._saver, self._beats, self._committed, self._say = saver, beats, committed, say
        self.checkpoint: str | None = None

    def is_done(self) -> bool:
        """Whether this rank's part of a save under way has ended: its vote for collecting it after the next step."""
        return self._saver.is_done()

    def save(self, state: RunState, write_line: Callable[[float], None], *, waits: bool) -> None:
        """Save the state after a step. waits: until it is committed, as is always so without `async_save`.

        write_line: journals the step, given the seconds that training has waited so far. It is called before the
        commit: the other way round, a kill between the two would leave a checkpoint whose last step no line tells of,
        and the resumed run would not train it again.
        """
        self._beats.beat(Phase.SAVE)
        began, waits = time.perf_counter(), waits or not self._saver.is_async
        if self._saver.step is not None:
            self._wait_for_one_before(state.step)
        self._saver.start(state, lambda: write_line(time.perf_counter() - began), waits=waits)
        if waits:
            self.collect()
        self._beats.stats.checkpoint_blocking_seconds_sum += time.perf_counter() - began

    def collect(self) -> None:
        """Learn how the save under way went; every rank at the same border. Waits for it. Raises SaveFailed."""
        saved = self._saver.collect()
        self.checkpoint = saved.name
        self._committed(saved.name)
        stats = self._beats.stats
        stats.checkpoint_saves_total += 1
        stats.checkpoint_last_step, stats.checkpoint_last_unix = saved.step, saved.unix
        stats.checkpoint_bytes = saved.bytes

    def finish(self) -> None:
        """Let a save under way come to its end, before a run ends on all ranks for a reason of its own."""
        if self._saver.step is None:
            return
        step, phase = self._saver.step, self._beats.phase
        self._beats.beat(Phase.SAVE)
        try:
            self.collect()
        except SaveFailed as error:
            _log.error("the save of step %d, under way when the run ended, failed: %s", step, error)
        self._beats.beat(phase)  # where the run ended

    def _wait_for_one_before(self, step: int) -> None:
        before, is_done, began = self._saver.step, self._saver.is_done(), time.perf_counter()
        self.collect()
        if not is_done:
            self._say(
                f"step {step}: training waited {time.perf_counter() - began:.1f} s, because the checkpoint of step "
                f"{before} was still being written. Raise checkpoints.checkpoint_interval or use faster storage: "
                "else it waits at every save."
            )
