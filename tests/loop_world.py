"""A training loop with an engine and a loader of a few lines, and what happened in it."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainer.beat import CONTROL, CONTROL_AT, BeatWriter, Phase, Word, open_beats
from trainer.checkpoint.state import RunState
from trainer.control import Control
from trainer.data.batch import IGNORE_LABEL, StepBatch
from trainer.data.loader import HeldOut
from trainer.errors import DataError, DesyncError
from trainer.journal import Journal
from trainer.loop import LoopEnd, LoopPlan, TrainLoop
from trainer.profiler import StepProfiler
from trainer.records import Epoch
from trainer.saves import Saves
from trainer.signals import DrainFlag
from trainer.throughput import StepCost

EPOCH = Epoch(attempt=1, generation=1, cycle=1)
SAMPLES, TOKENS, DP = 4, 32, 3
COST = StepCost(
    tokens=TOKENS, samples=SAMPLES, flops=10.0, flops_full_attn=12.0, flops_megatron=11.0, flops_hardware=13.0,
    peak_flops_per_s=None, pairs=9, flops_per_pair=0.5, hardware_per_pair=1.0,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FakeResult:
    loss: float
    grad_norm: float = 1.0
    num_valid: int = TOKENS
    finite: bool = True
    skipped: str | None = None
    control_word: int = 0
    next_num_valid: int = 0
    num_pairs: int = 9
    profile_steps: int = 0
    grad_norms: dict[str, float] | None = None
    save_done: bool = False


@dataclass
class FakeEngine:
    """Loss is a function of the samples seen; remembers what it was asked."""

    asked: list[dict[str, float]] = field(default_factory=list)
    counts: list[tuple[int | None, int]] = field(default_factory=list)
    after: Callable[[FakeResult], FakeResult] = lambda result: result
    collective_seq: int = 0

    def train_step(
        self, batch: StepBatch, *, lr: float, weight_decay: float, adam_t: int, control_word: int,
        profile_steps: int, num_valid: int | None, next_valid: int, grad_norms: bool, save_done: bool,
    ) -> FakeResult:  # fmt: skip
        self.collective_seq += 2
        by_block = {"model.norm": 1.0} if grad_norms else None
        self.counts.append((num_valid, next_valid))
        self.asked.append({"sample": batch.sample_ids[0], "lr": lr, "adam_t": adam_t})
        loss = 10.0 / (1 + batch.sample_ids[0])
        counts = {"next_num_valid": DP * next_valid, "profile_steps": profile_steps, "save_done": save_done}
        return self.after(FakeResult(loss=loss, control_word=control_word, grad_norms=by_block, **counts))

    def eval_loss(self, batch: StepBatch) -> tuple[float, int]:
        self.collective_seq += 1
        return 2.0 * len(batch.sample_ids) * (1 + batch.sample_ids[0]), len(batch.sample_ids)


@dataclass
class FakeLoader:
    held_out: tuple[HeldOut, ...] = ()
    read: list[int] = field(default_factory=list)
    bad_step: int | None = None

    def batch(self, step_index0: int, consumed_samples: int) -> StepBatch:
        self.read.append(step_index0 + 1)
        if step_index0 + 1 == self.bad_step:
            raise DataError(f"a bad id in step {step_index0 + 1}")
        return make_batch(range(consumed_samples, consumed_samples + SAMPLES))

    def validation_batches(self) -> Iterator[tuple[int, StepBatch]]:
        for number, held in enumerate(self.held_out):
            for first in range(0, held.num_samples, SAMPLES):
                yield number, make_batch(range(first, first + SAMPLES))


BOOKS, CODE = HeldOut(folder="data/books", num_samples=8), HeldOut(folder="data/code", num_samples=4)


def make_batch(ids: range) -> StepBatch:
    """One micro-batch; as many labels are left out as the first sample's number, so every step has another count."""
    zeros = torch.zeros(1, len(ids), 8, dtype=torch.int64)
    labels = zeros.clone()
    labels.view(-1)[: ids.start] = IGNORE_LABEL
    return StepBatch(input_ids_MBT=zeros, labels_MBT=labels, position_ids_MBT=zeros, sample_ids=tuple(ids))


def valid(step: int) -> int:
    """Labels of `make_batch` that count, in the batch of a step."""
    return TOKENS - SAMPLES * (step - 1)


@dataclass(frozen=True, kw_only=True)
class Saved:
    name: str
    step: int
    bytes: int = 1000
    unix: float = 5.0


class FakeSaver:
    """Saves through the harness; one that nobody waits for is written once `steps` more steps are done.

    steps None: saves only while training waits. error: what each save ends with instead. `waited`: the steps whose
    save was collected before it was written.
    """

    def __init__(self, world: "Harness", *, steps: int | None = None, error: Exception | None = None) -> None:
        self.world, self.steps, self.error = world, steps, error
        self.is_async = steps is not None
        self.state: RunState | None = None
        self.waited: list[int] = []

    @property
    def step(self) -> int | None:
        return None if self.state is None else self.state.step

    def is_done(self) -> bool:
        return self.state is not None and self.world.beats.step >= self.state.step + (self.steps or 0)

    def start(self, state: RunState, before_commit: Callable[[], None], *, waits: bool) -> None:
        assert self.state is None and self.world.beats.phase is Phase.SAVE and (waits or self.is_async)
        self.state, self.line = state, before_commit
        if not waits:
            before_commit()
            self.line = lambda: None

    def collect(self) -> Saved:
        assert self.state is not None
        state, is_done = self.state, self.is_done()
        self.state = None
        if not is_done:
            assert self.world.beats.phase is Phase.SAVE, "the agent could take the wait for a hang"
            self.waited.append(state.step)
        if self.error is not None:
            raise self.error
        return self.world.save(state, self.line)


class Harness:
    """A loop with its world, and what happened in it."""

    def __init__(self, cycle_dir: Path, *, train_steps: int = 6, interval: int = 4, **parts: Any) -> None:
        self.engine: FakeEngine = parts.get("engine", FakeEngine())
        self.loader: FakeLoader = parts.get("loader", FakeLoader())
        self.beats = open_beats(None, epoch=EPOCH, rank=0, local_rank=0)
        self.saves: list[RunState] = []
        self.compared: list[int] = []
        self.unequal_at: int | None = parts.get("unequal_at")
        self.saver = FakeSaver(self, steps=parts.get("save_steps"), error=parts.get("save_error"))
        self.said: list[str] = []
        self.committed: list[str] = []
        self.windows: list[int] = []
        self.phases: list[Phase] = []
        self.drain = DrainFlag()
        self.cycle_dir = cycle_dir
        self.plan = LoopPlan(
            epoch=EPOCH,
            train_steps=train_steps,
            checkpoint_interval=interval,
            validation_interval=parts.get("validation_interval"),
            replica_interval=parts.get("replica_interval"),
            grad_norms_interval=parts.get("grad_norms_interval"),
            cost=lambda consumed_samples: COST,
            lr=lambda step: step / 100,
            weight_decay=lambda step: 0.1,
        )  # fmt: skip

    def compare(self, state: RunState) -> None:
        self.compared.append(state.step)
        if state.step == self.unequal_at:
            raise DesyncError(f"step {state.step}", suspects=(1,))

    def save(self, state: RunState, before_commit: Callable[[], None]) -> Saved:
        before_commit()
        lines = [line["step"] for line in self.lines()]
        assert state.step in lines, "whoever finds the checkpoint finds the step's line"
        self.saves.append(state)
        return Saved(name=f"step-{state.step:09d}.{EPOCH.text}", step=state.step)

    def run(self, state: RunState | None = None) -> LoopEnd:
        profiler = StepProfiler(
            None, rank=0, epoch_text=EPOCH.text, folder=self.cycle_dir, beats=self.beats,
            wait=lambda: self.windows.append(self.beats.step),
        )  # fmt: skip
        with Journal(self.cycle_dir, print_interval=1) as journal, profiler:
            saves = Saves(self.saver, self.beats, committed=self.committed.append, say=self.said.append)
            loop = TrainLoop(
                engine=self.engine, loader=self.loader, plan=self.plan, beats=self.beats,
                control=Control(self.beats, self.drain), profiler=profiler, journal=journal, saves=saves,
                compare=self.compare, memory=lambda: (7, 9),
                validated=lambda step: step in self.measured(),
            )  # fmt: skip
            return loop.run(RunState() if state is None else state)

    def measured(self) -> list[int]:
        """The steps that have a line in validation.jsonl, in order."""
        file = self.cycle_dir / "validation.jsonl"
        return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.cycle_dir / "train.jsonl").read_text().splitlines()]


def ask(beats: BeatWriter, seq: int, word: Word) -> None:
    CONTROL.pack_into(beats._memory, CONTROL_AT, seq, word)
