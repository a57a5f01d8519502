"""The training loop: what happens between two step borders, and at a border.

    border ─ control word ─ DATA batch ─ STEP update ─ agree ─┬─ finite? ─ no ─▶ NonFiniteError (nobody has moved)
       ▲                                                      ├─ compare replicas at their interval and before a save
       │                                                      └─ SAVE at the interval, at the end, on save or drain
       └─── EVAL at its interval and at the end ◀─── line, beat, stats, garbage ◀──┘

The loop knows neither mesh nor files: it is given an engine, a loader, a way to save and a journal. `RunState` in, the
next `RunState` out; everything that must survive a kill is in it.
"""

import gc
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn, Protocol

from trainer.beat import BeatWriter, Phase, Word
from trainer.checkpoint.state import RunState
from trainer.control import Control
from trainer.data.ahead import ReadAhead
from trainer.data.batch import StepBatch
from trainer.errors import DesyncError, NonFiniteError
from trainer.journal import Journal
from trainer.profiler import StepProfiler
from trainer.records import Epoch, TrainLine
from trainer.saves import Saves
from trainer.throughput import StepCost, rates
from trainer.validation import Evaluates, HoldsOut, validate

GC_INTERVAL_STEPS = 100


class StepResultLike(Protocol):
    """What an engine says about a step; equal on all ranks."""

    @property
    def loss(self) -> float: ...
    @property
    def grad_norm(self) -> float: ...
    @property
    def num_valid(self) -> int: ...
    @property
    def finite(self) -> bool: ...
    @property
    def skipped(self) -> str | None: ...
    @property
    def control_word(self) -> int: ...
    @property
    def next_num_valid(self) -> int: ...
    @property
    def num_pairs(self) -> int: ...
    @property
    def profile_steps(self) -> int: ...
    @property
    def grad_norms(self) -> Mapping[str, float] | None: ...
    @property
    def save_done(self) -> bool: ...


class EngineLike(Evaluates, Protocol):
    """The part of an engine the loop uses."""

    def train_step(
        self, batch: StepBatch, *, lr: float, weight_decay: float, adam_t: int, control_word: int,
        profile_steps: int, num_valid: int | None, next_valid: int, grad_norms: bool, save_done: bool,
    ) -> StepResultLike: ...  # fmt: skip


class LoaderLike(HoldsOut, Protocol):
    """The part of a loader the loop uses."""

    def batch(self, step_index0: int, consumed_samples: int) -> StepBatch: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPlan:
    """What the config asks of the loop.

    `lr` and `weight_decay` are functions of the 1-based step, `cost` (of the step that is due) of the samples consumed.
    validation_interval None: held-out sets are measured after the last step only. replica_interval None: replicas are
    not compared between saves. grad_norms_interval None: each block's gradient norm is taken in profiled steps only.
    """

    epoch: Epoch
    train_steps: int
    checkpoint_interval: int
    validation_interval: int | None = None
    replica_interval: int | None = None
    grad_norms_interval: int | None = None
    cost: Callable[[int], StepCost]
    lr: Callable[[int], float]
    weight_decay: Callable[[int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """One step taken: the state after it, its cost, and its numbers (`loss` None where nothing was trained)."""

    state: RunState
    cost: StepCost
    loss: float | None
    grad_norm: float | None
    num_valid: int
    lr: float
    skipped: str | None
    agreed: Word
    seconds: float
    data_wait_s: float
    profile_steps: int = 0
    grad_norms: Mapping[str, float] | None = None
    save_done: bool = False

    @property
    def computed(self) -> StepCost:
        """What the step computed: nothing where its batch was passed over."""
        return self.cost.if_trained(self.skipped is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopEnd:
    """How the loop ended: all steps done, or drained before."""

    state: RunState
    drained: bool
    checkpoint: str | None


class TrainLoop:
    """Runs steps until the last one or a drain. Every rank runs the same loop and takes the same turns."""

    def __init__(
        self,
        *,
        engine: EngineLike,
        loader: LoaderLike,
        plan: LoopPlan,
        beats: BeatWriter,
        control: Control,
        profiler: StepProfiler,
        journal: Journal,
        saves: Saves,
        compare: Callable[[RunState], None],
        memory: Callable[[], tuple[int, int]],
        validated: Callable[[int], bool],
    ) -> None:
        self.engine, self.loader, self.plan = engine, loader, plan
        self.ahead = ReadAhead(loader)
        self.beats, self.control, self.profiler, self.journal = beats, control, profiler, journal
        self.saves, self._compare, self._memory, self._validated = saves, compare, memory, validated

    def run(self, state: RunState) -> LoopEnd:
        """Train from `state` to the last step or a drain, then stop at that border with a checkpoint committed.

        A validation that an earlier launch owes, because it ended between a save and the pass, is made up first.
        Raises NonFiniteError (the weights are those of the step before), DesyncError, DataError, SaveFailed at a
        border after the save, and whatever the engine raises.
        """
        gc.collect()
        gc.disable()  # collected at borders instead: on thousands of ranks one of them always pauses in mid-step
        try:
            if self.is_validation_due(state.step) and not self._validated(state.step):
                self.validate(state)
            while state.step < self.plan.train_steps:
                with self.profiler.step(state.step + 1):
                    taken = self.take_step(state)
                state = taken.state
                word = taken.agreed
                self.finish_step(taken)
                self.profiler.finish(state.step)
                self.profiler.agree(state.step, taken.profile_steps)
                if word is not Word.NONE:
                    self.control.acknowledge()
                if word is Word.DRAIN and state.step < self.plan.train_steps:
                    return LoopEnd(state=state, drained=True, checkpoint=self.saves.checkpoint)
                if self.is_validation_due(state.step):
                    self.validate(state)
        except (NonFiniteError, DesyncError):  # raised by all ranks at the same border
            self.saves.finish()
            raise
        finally:
            gc.enable()
        return LoopEnd(state=state, drained=False, checkpoint=self.saves.checkpoint)

    def take_step(self, state: RunState) -> Taken:
        """One update, or one batch passed over because its step lies in a skip window."""
        began = time.perf_counter()
        step, cost = state.step + 1, self.plan.cost(state.consumed_samples)
        lr = self.plan.lr(step)
        if in_windows(step, state.skip_windows):
            return self.pass_over(state, lr=lr, seconds=time.perf_counter() - began)
        self.beats.beat(Phase.DATA)
        batch, num_valid = self.ahead.take(state.step, state.consumed_samples)
        next_valid = self.look_ahead(state)
        data_wait_s = time.perf_counter() - began
        self.beats.beat(Phase.STEP)
        result = self.engine.train_step(
            batch,
            lr=lr,
            weight_decay=self.plan.weight_decay(step),
            adam_t=state.adam_t + 1,
            control_word=self.control.wish(),
            profile_steps=self.profiler.wish(),
            num_valid=num_valid,
            next_valid=next_valid,
            grad_norms=self.are_grad_norms_due(step),
            save_done=self.saves.is_done(),
        )
        self.ahead.note(result.next_num_valid)
        seconds = time.perf_counter() - began
        if not result.finite:
            self.report_nonfinite(step, state, result)
        trained = result.skipped is None
        return Taken(
            state=advance(state, cost, updated=trained),
            cost=cost.of_pairs(result.num_pairs),
            loss=result.loss if trained else None,
            grad_norm=result.grad_norm if trained else None,
            num_valid=result.num_valid,
            lr=lr,
            skipped=result.skipped,
            agreed=Word(result.control_word),
            seconds=seconds,
            data_wait_s=data_wait_s,
            profile_steps=result.profile_steps,
            grad_norms=result.grad_norms,
            save_done=result.save_done,
        )

    def pass_over(self, state: RunState, *, lr: float, seconds: float) -> Taken:
        """A step in a skip window. Its batch is not even read: it may be the very thing that has to be skipped."""
        cost = self.plan.cost(state.consumed_samples)
        return Taken(
            state=advance(state, cost, updated=False),
            cost=cost,
            loss=None,
            grad_norm=None,
            num_valid=0,
            lr=lr,
            skipped="skip_window",
            agreed=Word.NONE,
            seconds=seconds,
            data_wait_s=0.0,
        )

    def are_grad_norms_due(self, step: int) -> bool:
        """At their interval and in a profile; equal on all ranks, for they cost a collective."""
        interval = self.plan.grad_norms_interval
        return self.profiler.covers(step) or (interval is not None and step % interval == 0)

    def look_ahead(self, state: RunState) -> int:
        """Read the batch after the one that is due; this dp rank's valid labels in it, 0 if it will not be trained."""
        coming = state.step + 2
        if coming > self.plan.train_steps or in_windows(coming, state.skip_windows):
            return 0
        return self.ahead.look(state.step + 1, state.consumed_samples + self.plan.cost(state.consumed_samples).samples)

    def finish_step(self, taken: Taken) -> None:
        """Publish a completed step (beat, stats, journal), with a checkpoint if one is due; then collect garbage."""
        state = taken.state
        self.beats.beat(
            step=state.step,
            collective_seq=self.engine.collective_seq,
            loss=math.nan if taken.loss is None else taken.loss,
            tokens=state.consumed_tokens,
        )
        self.count(taken)
        if self.is_save_due(state, taken.agreed):
            self.save(taken)  # compares replicas itself, and collects the save before
        else:
            if self.plan.replica_interval is not None and state.step % self.plan.replica_interval == 0:
                self._compare(state)
            self.write_line(taken, save_s=None)
            if taken.save_done:
                self.saves.collect()
        self.beats.publish_stats()
        if state.step % GC_INTERVAL_STEPS == 0:
            gc.collect()

    def is_save_due(self, state: RunState, word: Word) -> bool:
        """At the interval, at the last step and when asked; a border has one save whatever the reasons."""
        at_interval = state.step % self.plan.checkpoint_interval == 0
        return at_interval or state.step == self.plan.train_steps or word is not Word.NONE

    def save(self, taken: Taken) -> None:
        """Save the state after a step; who asked for it, and the end of the run, wait until it is committed."""
        is_last = taken.state.step == self.plan.train_steps
        waits = is_last or taken.agreed is not Word.NONE
        self.saves.save(taken.state, lambda seconds: self.write_line(taken, save_s=seconds), waits=waits)

    def write_line(self, taken: Taken, *, save_s: float | None) -> None:
        """Journal a completed step; only rank 0 keeps a journal."""
        self.journal.step(self.line(taken, save_s=save_s), train_steps=self.plan.train_steps)

    def count(self, taken: Taken) -> None:
        """Add a step to the stats of this process."""
        stats, cost = self.beats.stats, taken.cost
        stats.steps_total += 1
        stats.tokens_total += cost.tokens
        stats.samples_total += cost.samples
        stats.skipped_steps_total += taken.skipped is not None
        stats.model_flops_total += taken.computed.flops
        stats.data_wait_seconds_total += taken.data_wait_s
        stats.observe_step_seconds(taken.seconds)
        stats.learning_rate = taken.lr
        if taken.loss is not None and taken.grad_norm is not None:
            stats.loss, stats.grad_norm = taken.loss, taken.grad_norm
        rate = rates(taken.computed, taken.seconds)
        stats.tokens_per_second = rate.tokens_per_s
        stats.mfu = math.nan if rate.mfu is None else rate.mfu
        stats.memory_allocated_bytes, stats.memory_peak_bytes = self._memory()
        stats.last_unix = time.time()

    def line(self, taken: Taken, *, save_s: float | None) -> TrainLine:
        """The train.jsonl line of a step."""
        rate = rates(taken.computed, taken.seconds)
        return TrainLine(
            step=taken.state.step,
            epoch=self.plan.epoch.text,
            consumed_samples=taken.state.consumed_samples,
            tokens=taken.state.consumed_tokens,
            loss=taken.loss,
            grad_norm=taken.grad_norm,
            lr=taken.lr,
            num_valid=taken.num_valid,
            step_time_s=taken.seconds,
            data_wait_s=taken.data_wait_s,
            tokens_per_s=rate.tokens_per_s,
            model_flops=taken.computed.flops,
            mfu=rate.mfu,
            mfu_full_attn=rate.mfu_full_attn,
            mfu_megatron=rate.mfu_megatron,
            hfu=rate.hfu,
            skipped=taken.skipped,
            save_s=save_s,
            grad_norms=taken.grad_norms,
            unix=time.time(),
        )

    def report_nonfinite(self, step: int, state: RunState, result: StepResultLike) -> NoReturn:
        """Count a step that nobody took and raise NonFiniteError. It is not a completed step and gets no line."""
        stats = self.beats.stats
        stats.nonfinite_steps_total += 1
        stats.last_unix = time.time()
        self.beats.publish_stats()
        last_sample = state.consumed_samples + self.plan.cost(state.consumed_samples).samples - 1
        raise NonFiniteError(
            f"Step {step} is not finite: loss {result.loss}, gradient norm {result.grad_norm}, over samples "
            f"{state.consumed_samples} to {last_sample}. No rank has updated its weights. If the same step fails again "
            f"after a resume, its samples are the cause: pass over them, or lower the learning rate."
        )

    def is_validation_due(self, step: int) -> bool:
        """At its interval and after the last step, where there is anything to measure."""
        interval = self.plan.validation_interval
        at_interval = interval is not None and step > 0 and step % interval == 0
        return bool(self.loader.held_out) and (at_interval or step == self.plan.train_steps)

    def validate(self, state: RunState) -> None:
        """One pass over the held-out sets, and its line in validation.jsonl."""
        self.journal.validation(validate(self.engine, self.loader, self.beats, step=state.step))


def advance(state: RunState, cost: StepCost, *, updated: bool) -> RunState:
    """The state after one more step: its samples are consumed either way, Adam's clock moves only with an update."""
    return RunState(
        step=state.step + 1,
        consumed_samples=state.consumed_samples + cost.samples,
        consumed_tokens=state.consumed_tokens + cost.tokens,
        adam_t=state.adam_t + updated,
        skip_windows=state.skip_windows,
    )


def in_windows(step: int, windows: tuple[tuple[int, int], ...]) -> bool:
    """Whether a step lies in one of the windows, ends included."""
    return any(first <= step <= last for first, last in windows)
