"""When a rank saves: beside training, from a snapshot, or while training waits.

    border of step 400   compare copies ▸ snapshot ▸ the step's line      training waits for this
    beside steps 401 …   write_checkpoint (`save.py`), in a thread         all ranks meet in a group of its own
    border of step 40x   every rank's thread has ended: all learn how      `is_done` goes into the step's reduction

All that a save needs is handed over at its border: step, run state and values are those of that moment, whatever
training does meanwhile. At most one save is under way. One that training waits for needs no snapshot and is written
from the live state; everything else is the same.
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.contents import RankContents
from trainer.checkpoint.naming import CheckpointName, parse_epoch
from trainer.checkpoint.save import Facts, SaveResult, model_record, write_checkpoint
from trainer.checkpoint.shards import RankShards, shards_of
from trainer.checkpoint.state import RunState
from trainer.checkpoint.together import Meeting
from trainer.digests import check_replicas
from trainer.replicas import Scope

if TYPE_CHECKING:
    from trainer.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """What all checkpoints of a launch say. tokenizer: its record, made when the run starts (`tokenizer_record`)."""

    checkpoints_dir: Path
    epoch: str
    run: str
    config_text: str
    model_config: Mapping[str, Any]
    tokenizer: Mapping[str, Any] | None

    def facts(self, state: RunState) -> Facts:
        return Facts(
            run=self.run,
            name=CheckpointName(state.step, parse_epoch(self.epoch)),
            state=state,
            config_text=self.config_text,
            model_config=self.model_config,
            tokenizer=self.tokenizer,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnderWay:
    step: int
    outcome: "Future[SaveResult]"


class Saver:
    """The saves of one rank. Every rank makes the same calls, each at the same step border.

    shards: what the rank stores, live. meeting: where the writing threads of all ranks meet; with `is_async` never one
    that the step uses. compare: raises on every rank if copies differ after a step; such a state is not saved.
    """

    def __init__(
        self,
        label: Label,
        *,
        meeting: Meeting,
        shards: Callable[[], RankShards],
        compare: Callable[[int], None],
        is_async: bool,
    ) -> None:
        self.label, self.meeting, self.is_async = label, meeting, is_async
        self._shards, self._compare = shards, compare
        self._contents = RankContents(shards(), keeps_snapshot=is_async)
        self._under_way: _UnderWay | None = None

    @property
    def step(self) -> int | None:
        """The step whose save is under way, or has ended and was not collected; None: there is none."""
        return None if self._under_way is None else self._under_way.step

    @property
    def snapshot_bytes(self) -> int:
        """Host memory that snapshots take."""
        return self._contents.snapshot_bytes

    def is_done(self) -> bool:
        """Whether this rank's part of the save under way has ended, well or not."""
        return self._under_way is not None and self._under_way.outcome.done()

    def start(self, state: RunState, before_commit: Callable[[], None] | None = None, *, waits: bool) -> None:
        """Begin to save `state`, which the live tensors hold now. Comm: as `compare`.

        before_commit: what it records is on disk whenever the checkpoint is. waits: returns when the save has ended,
        well or not, and before_commit is called by rank 0 just before the rename; else here, by every rank. Raises
        what `compare` raises.
        """
        assert self._under_way is None, "at most one save at a time"
        assert waits or self.is_async, "without a snapshot training has to wait"
        self._compare(state.step)
        shards = self._shards()
        contents = self._contents.live(shards) if waits else self._contents.snapshot(shards)
        if not waits and before_commit is not None:
            before_commit()
        write = partial(
            write_checkpoint, self.meeting, contents, shards, self.label.facts(state),
            checkpoints_dir=self.label.checkpoints_dir, before_commit=before_commit if waits else None,
        )  # fmt: skip
        self._under_way = _UnderWay(step=state.step, outcome=_in_thread(write, name=f"save-{state.step}"))
        if waits:
            self._under_way.outcome.exception()  # waits, raises nothing

    def collect(self) -> SaveResult:
        """Wait for the save under way, and make place for the next. Raises SaveFailed on every rank if it failed."""
        assert self._under_way is not None, "no save to collect"
        outcome = self._under_way.outcome
        try:
            return outcome.result()
        finally:
            # Not before: a rank that is interrupted while it waits still has a save under way.
            self._under_way = None if outcome.done() else self._under_way


def _in_thread(act: Callable[[], SaveResult], *, name: str) -> "Future[SaveResult]":
    outcome: Future[SaveResult] = Future()

    def run() -> None:
        try:
            outcome.set_result(act())
        except BaseException as error:  # raised again by whoever collects
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome


def engine_saver(
    engine: "Engine",
    *,
    checkpoints_dir: Path,
    epoch: str,
    run: str,
    config_text: str,
    tokenizer: Mapping[str, Any] | None,
    compare: Scope = Scope.TIED,
    background: Meeting | None = None,
) -> Saver:
    """The saver of an engine. background: given, it saves beside training. compare: which copies must be equal."""
    label = Label(
        checkpoints_dir=checkpoints_dir,
        epoch=epoch,
        run=run,
        config_text=config_text,
        model_config=model_record(engine.config),
        tokenizer=tokenizer,
    )
    return Saver(
        label,
        meeting=engine.ctx if background is None else background,
        shards=lambda: shards_of(engine),
        compare=lambda step: check_replicas(engine, step=step, scope=compare),
        is_async=background is not None,
    )


def save_checkpoint(
    engine: "Engine", state: RunState, before_commit: Callable[[], None] | None = None, **label: Any
) -> SaveResult:
    """Commit one checkpoint of `state` and wait for it; `label` as `engine_saver`. Comm: 3 all-gathers of a kilobyte
    (world), and those of `check_replicas`.

    Raises DesyncError on every rank if copies differ, SaveFailed on every rank if any rank fails.
    """
    saver = engine_saver(engine, **label)
    saver.start(state, before_commit, waits=True)
    return saver.collect()
