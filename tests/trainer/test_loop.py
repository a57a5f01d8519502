"""The loop with an engine of a few lines: order of phases, when it saves, what it counts, and how it stops."""

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.beat import CONTROL, CONTROL_AT, PROFILE, PROFILE_AT, BeatWriter, Phase, Word, open_beats
from trainer.checkpoint.state import RunState
from trainer.control import Control
from trainer.data.batch import IGNORE_LABEL, StepBatch
from trainer.data.loader import HeldOut
from trainer.errors import DataError, DesyncError, NonFiniteError
from trainer.journal import Journal, validated
from trainer.loop import LoopEnd, LoopPlan, TrainLoop, in_windows
from trainer.profiler import StepProfiler
from trainer.records import Epoch
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


@dataclass
class FakeEngine:
    """Loss is a function of the samples seen; remembers what it was asked."""

    asked: list[dict[str, float]] = field(default_factory=list)
    counts: list[tuple[int | None, int]] = field(default_factory=list)
    after: Callable[[FakeResult], FakeResult] = lambda result: result
    collective_seq: int = 0

    def train_step(
        self, batch: StepBatch, *, lr: float, weight_decay: float, adam_t: int, control_word: int,
        profile_steps: int, num_valid: int | None, next_valid: int, grad_norms: bool,
    ) -> FakeResult:  # fmt: skip
        self.collective_seq += 2
        by_block = {"model.norm": 1.0} if grad_norms else None
        self.counts.append((num_valid, next_valid))
        self.asked.append({"sample": batch.sample_ids[0], "lr": lr, "adam_t": adam_t})
        loss = 10.0 / (1 + batch.sample_ids[0])
        counts = {"next_num_valid": DP * next_valid, "profile_steps": profile_steps}
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
    bytes: int = 1000


class Harness:
    """A loop with its world, and what happened in it."""

    def __init__(self, cycle_dir: Path, *, train_steps: int = 6, interval: int = 4, **parts: Any) -> None:
        self.engine: FakeEngine = parts.get("engine", FakeEngine())
        self.loader: FakeLoader = parts.get("loader", FakeLoader())
        self.beats = open_beats(None, epoch=EPOCH, rank=0, local_rank=0)
        self.saves: list[RunState] = []
        self.compared: list[int] = []
        self.unequal_at: int | None = parts.get("unequal_at")
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
        assert self.beats.phase is Phase.SAVE
        before_commit()
        assert self.lines()[-1]["step"] == state.step, "whoever finds the checkpoint finds the step's line"
        self.saves.append(state)
        return Saved(name=f"step-{state.step:09d}.{EPOCH.text}")

    def run(self, state: RunState | None = None) -> LoopEnd:
        profiler = StepProfiler(
            None, rank=0, epoch_text=EPOCH.text, folder=self.cycle_dir, beats=self.beats,
            wait=lambda: self.windows.append(self.beats.step),
        )  # fmt: skip
        with Journal(self.cycle_dir, print_interval=1) as journal, profiler:
            loop = TrainLoop(
                engine=self.engine, loader=self.loader, plan=self.plan, beats=self.beats,
                control=Control(self.beats, self.drain), profiler=profiler, journal=journal, save=self.save,
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


def test_trains_to_the_end_and_saves_at_the_interval_and_once_at_the_end(tmp_path: Path) -> None:
    world = Harness(tmp_path)
    end = world.run()
    assert not end.drained
    assert end.state == RunState(step=6, consumed_samples=24, consumed_tokens=192, adam_t=6)
    assert [state.step for state in world.saves] == [4, 6]
    assert end.checkpoint == "step-000000006.a0001g01c0001"
    assert [line["step"] for line in world.lines()] == [1, 2, 3, 4, 5, 6]
    assert [line["save_s"] is None for line in world.lines()] == [True, True, True, False, True, False]
    assert [call["lr"] for call in world.engine.asked] == [step / 100 for step in range(1, 7)]


def test_the_last_step_on_the_interval_is_saved_once(tmp_path: Path) -> None:
    world = Harness(tmp_path, train_steps=8, interval=4)
    world.run()
    assert [state.step for state in world.saves] == [4, 8]


def test_a_complete_run_does_nothing(tmp_path: Path) -> None:
    """R5. Megatron-LM#1310: a resume at the last step must neither train nor save."""
    world = Harness(tmp_path)
    end = world.run(RunState(step=6, consumed_samples=24, consumed_tokens=192, adam_t=6))
    assert (end.drained, world.saves, world.engine.asked, world.lines()) == (False, [], [], [])


def test_resume_asks_for_exactly_what_would_have_come(tmp_path: Path) -> None:
    whole = Harness(tmp_path)
    whole.run()
    (tmp_path / "second").mkdir()
    second = Harness(tmp_path / "second")
    second.run(whole.saves[0])
    assert second.engine.asked == whole.engine.asked[4:]
    strip = ("step_time_s", "data_wait_s", "tokens_per_s", "unix", "save_s")
    kept = [{key: value for key, value in line.items() if key not in strip} for line in second.lines()]
    assert kept == [{k: v for k, v in line.items() if k not in strip} for line in whole.lines()[4:]]


def test_a_window_consumes_samples_without_reading_or_updating(tmp_path: Path) -> None:
    world = Harness(tmp_path, interval=100)
    end = world.run(RunState(skip_windows=((2, 3), (5, 5))))
    assert world.loader.read == [1, 4, 6]
    assert [call["adam_t"] for call in world.engine.asked] == [1, 2, 3]
    assert [call["sample"] for call in world.engine.asked] == [0, 12, 20]
    assert (end.state.step, end.state.adam_t, end.state.consumed_samples) == (6, 3, 24)
    skipped = [line for line in world.lines() if line["skipped"]]
    assert [(line["step"], line["loss"], line["skipped"]) for line in skipped] == [
        (2, None, "skip_window"), (3, None, "skip_window"), (5, None, "skip_window"),
    ]  # fmt: skip
    assert "nonfinite" not in skipped[0]
    assert world.beats.stats.skipped_steps_total == 3


def test_each_batch_is_read_once_and_its_labels_are_counted_with_the_step_before(tmp_path: Path) -> None:
    world = Harness(tmp_path)
    world.run()
    assert world.loader.read == [1, 2, 3, 4, 5, 6], "in order, none twice, none after the last"
    assert world.engine.counts[0] == (None, valid(2)), "nobody has counted the first"
    assert world.engine.counts[1:] == [(DP * valid(step), valid(step + 1)) for step in range(2, 6)] + [
        (DP * valid(6), 0)
    ]


def test_after_a_resume_and_after_a_window_the_labels_are_counted_anew(tmp_path: Path) -> None:
    world = Harness(tmp_path, interval=100)
    world.run(RunState(step=1, consumed_samples=SAMPLES, consumed_tokens=TOKENS, adam_t=1, skip_windows=((4, 4),)))
    assert world.loader.read == [2, 3, 5, 6]
    assert world.engine.counts == [(None, valid(3)), (DP * valid(3), 0), (None, valid(6)), (DP * valid(6), 0)]


def test_a_batch_that_cannot_be_read_stops_its_own_step_and_not_the_one_before(tmp_path: Path) -> None:
    """The step before is trained and saved: a resume then passes over exactly the bad one."""
    world = Harness(tmp_path, interval=3, loader=FakeLoader(bad_step=4))
    with pytest.raises(DataError, match="step 4"):
        world.run()
    assert [line["step"] for line in world.lines()] == [1, 2, 3] and [state.step for state in world.saves] == [3]
    assert world.beats.step == 3 and world.beats.phase is Phase.DATA


def test_window_ends_are_included() -> None:
    assert [in_windows(step, ((2, 3),)) for step in (1, 2, 3, 4)] == [False, True, True, False]


def test_a_step_the_engine_skipped_does_not_move_adams_clock(tmp_path: Path) -> None:
    engine = FakeEngine(after=lambda result: FakeResult(loss=math.nan, num_valid=0, skipped="no valid labels"))
    world = Harness(tmp_path, train_steps=2, engine=engine)
    assert world.run().state.adam_t == 0
    assert [line["skipped"] for line in world.lines()] == ["no valid labels"] * 2


def test_nonfinite_stops_before_the_step_counts(tmp_path: Path) -> None:
    def third_is_nan(result: FakeResult) -> FakeResult:
        return result if len(world.engine.asked) < 3 else FakeResult(loss=math.nan, grad_norm=math.nan, finite=False)

    world = Harness(tmp_path)
    world.engine.after = third_is_nan
    with pytest.raises(NonFiniteError, match=r"Step 3 is not finite.*samples 8 to 11") as caught:
        world.run()
    assert caught.value.exit_code == 86
    assert [line["step"] for line in world.lines()] == [1, 2]
    assert world.beats.step == 2
    assert (world.beats.stats.nonfinite_steps_total, world.saves) == (1, [])


def test_replicas_are_compared_at_their_interval_and_else_by_the_save(tmp_path: Path) -> None:
    world = Harness(tmp_path, replica_interval=2)
    world.run()
    assert (world.compared, [state.step for state in world.saves]) == ([2], [4, 6])
    (tmp_path / "never").mkdir()
    never = Harness(tmp_path / "never")
    never.run()
    assert never.compared == []


def test_a_step_after_which_replicas_differ_gets_no_line_and_no_save(tmp_path: Path) -> None:
    world = Harness(tmp_path, interval=100, replica_interval=1, unequal_at=3)
    with pytest.raises(DesyncError, match="step 3"):
        world.run()
    assert ([line["step"] for line in world.lines()], world.saves) == ([1, 2], [])
    assert world.beats.step == 3


def test_save_is_done_at_this_border_and_training_goes_on(tmp_path: Path) -> None:
    world = Harness(tmp_path, interval=100)

    def ask_at_two(result: FakeResult) -> FakeResult:
        if len(world.engine.asked) == 1:
            ask(world.beats, 1, Word.SAVE)
        return result

    world.engine.after = ask_at_two
    end = world.run()
    assert (end.drained, [state.step for state in world.saves]) == (False, [2, 6])
    assert world.beats._beat.control_ack == 1


def test_drain_stops_at_the_next_border_with_a_checkpoint(tmp_path: Path) -> None:
    world = Harness(tmp_path, interval=100)
    ask(world.beats, 1, Word.DRAIN)
    end = world.run()
    assert end.drained
    assert end.checkpoint == "step-000000001.a0001g01c0001"
    assert [state.step for state in world.saves] == [1]
    assert world.beats._beat.control_ack == 1


def test_a_drain_on_the_interval_saves_once(tmp_path: Path) -> None:
    world = Harness(tmp_path, interval=1)
    world.drain.set(15, None)
    assert world.run().drained
    assert [state.step for state in world.saves] == [1]


def test_a_drain_in_the_last_step_is_done(tmp_path: Path) -> None:
    world = Harness(tmp_path, train_steps=1)
    ask(world.beats, 1, Word.DRAIN)
    end = world.run()
    assert not end.drained
    assert [state.step for state in world.saves] == [1]


def test_a_profile_is_taken_of_the_steps_after_the_border_and_hides_no_save(tmp_path: Path) -> None:
    world = Harness(tmp_path, train_steps=8, interval=100)

    def ask_at_two(result: FakeResult) -> FakeResult:
        if len(world.engine.asked) == 1:
            PROFILE.pack_into(world.beats._memory, PROFILE_AT, 1, 3, 0)
            ask(world.beats, 1, Word.SAVE)
        return result

    world.engine.after = ask_at_two
    world.run()
    assert [line["step"] for line in world.lines() if line["grad_norms"]] == [3, 4, 5], "and only once"
    assert world.windows == [5] and world.beats._beat.profile_ack == 1
    assert [state.step for state in world.saves] == [2, 8] and world.beats._beat.control_ack == 1


def test_a_drain_ends_a_profile_and_the_profile_is_answered(tmp_path: Path) -> None:
    world = Harness(tmp_path, train_steps=8, interval=100)
    PROFILE.pack_into(world.beats._memory, PROFILE_AT, 4, 50, 0)

    def drain_at_four(result: FakeResult) -> FakeResult:
        if len(world.engine.asked) == 3:
            ask(world.beats, 1, Word.DRAIN)
        return result

    world.engine.after = drain_at_four
    assert world.run().drained
    assert [state.step for state in world.saves] == [4] and world.windows == [4]
    assert world.beats._beat.profile_ack == 4


def test_gradient_norms_by_block_are_taken_at_their_interval(tmp_path: Path) -> None:
    world = Harness(tmp_path, grad_norms_interval=3)
    world.run()
    assert [line["step"] for line in world.lines() if line["grad_norms"] == {"model.norm": 1.0}] == [3, 6]
    assert [line["grad_norms"] for line in world.lines()].count(None) == 4


def test_a_step_passed_over_has_no_speed(tmp_path: Path) -> None:
    world = Harness(tmp_path, train_steps=3)
    world.plan = replace(world.plan, cost=lambda consumed_samples: replace(COST, peak_flops_per_s=1e3))
    world.run(RunState(skip_windows=((2, 2), (3, 3))))
    trained, skipped, _ = world.lines()
    assert trained["tokens_per_s"] > 0 and trained["mfu"] > 0
    work = ("tokens_per_s", "model_flops", "mfu", "mfu_full_attn", "mfu_megatron", "hfu")
    assert [skipped[key] for key in work] == [0.0] * 6
    assert (world.beats.stats.tokens_per_second, world.beats.stats.mfu) == (0.0, 0.0)


def test_the_line_of_a_saved_step_is_durable_before_the_checkpoint_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that dies takes its page cache along; a step a checkpoint covers is never trained again."""
    synced: list[int] = []
    monkeypatch.setattr("trainer.journal.os.fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    world = Harness(tmp_path)

    def save(state: RunState, before_commit: Callable[[], None]) -> Saved:
        before_commit()
        assert synced[-1] == (tmp_path / "train.jsonl").stat().st_size
        assert world.lines()[-1]["step"] == state.step
        return Saved(name="step")

    monkeypatch.setattr(world, "save", save)
    world.run()
    assert len(synced) == 2, "only where a checkpoint is made: a sync costs more than a small step"


def test_flops_are_those_of_the_pairs_that_the_documents_left(tmp_path: Path) -> None:
    engine = FakeEngine(after=lambda result: replace(result, num_pairs=5))
    world = Harness(tmp_path, train_steps=2, engine=engine)
    world.run()
    assert [line["model_flops"] for line in world.lines()] == [8.0, 8.0]
    assert world.beats.stats.model_flops_total == 16.0
    cut = COST.of_pairs(5)
    assert (cut.flops, cut.flops_hardware, cut.flops_full_attn, cut.flops_megatron) == (8.0, 9.0, 12.0, 11.0)
    assert COST.of_pairs(9) == COST


def test_stats_count_what_was_done(tmp_path: Path) -> None:
    world = Harness(tmp_path)
    world.run()
    stats = world.beats.stats
    assert (stats.steps_total, stats.samples_total, stats.tokens_total) == (6, 24, 192)
    assert stats.model_flops_total == 60.0
    assert (stats.checkpoint_saves_total, stats.checkpoint_last_step, stats.checkpoint_bytes) == (2, 6, 1000)
    assert sum(stats.step_seconds_histogram) == 6
    assert (stats.loss, stats.learning_rate) == (world.lines()[-1]["loss"], 0.06)
    assert (stats.memory_allocated_bytes, stats.memory_peak_bytes) == (7, 9)
    assert math.isnan(stats.mfu)


def test_validation_is_a_mean_over_labels_and_is_found_again(tmp_path: Path) -> None:
    cycle_dir = tmp_path / "attempts" / "0001" / "cycles" / "0001"
    cycle_dir.mkdir(parents=True)
    empty = HeldOut(folder="data/short", num_samples=0)
    world = Harness(cycle_dir, loader=FakeLoader(held_out=(BOOKS, empty, CODE)))
    assert not validated(tmp_path, 6)
    world.run()
    (line,) = (cycle_dir / "validation.jsonl").read_text().splitlines()
    read = json.loads(line)
    assert (read["step"], read["loss"], read["num_valid"], read["num_samples"]) == (6, 56 / 12, 12, 12)
    assert read["sources"] == [
        {"source": "data/books", "loss": 6.0, "num_valid": 8, "num_samples": 8},
        {"source": "data/short", "loss": None, "num_valid": 0, "num_samples": 0},
        {"source": "data/code", "loss": 2.0, "num_valid": 4, "num_samples": 4},
    ]
    assert (validated(tmp_path, 6), validated(tmp_path, 5)) == (True, False)


def test_held_out_sets_are_measured_at_their_interval_and_once_at_the_end(tmp_path: Path) -> None:
    world = Harness(tmp_path, train_steps=6, validation_interval=2, loader=FakeLoader(held_out=(BOOKS,)))
    seen: list[tuple[Phase, int]] = []
    measure = world.engine.eval_loss

    def eval_loss(batch: StepBatch) -> tuple[float, int]:
        seen.append((world.beats.phase, world.beats.step))
        return measure(batch)

    world.engine.eval_loss = eval_loss  # type: ignore[method-assign]
    world.run()
    assert world.measured() == [2, 4, 6]
    assert seen == [(Phase.EVAL, step) for step in (2, 2, 4, 4, 6, 6)]
    stats = world.beats.stats
    assert (stats.validation_passes_total, stats.validation_loss) == (3, 6.0) and stats.validation_seconds_total > 0


def test_a_validation_changes_nothing_of_the_training(tmp_path: Path) -> None:
    """R5. Megatron-Bridge#5076: a pass must not move the position in the training data."""
    plain = Harness(tmp_path)
    plain.run()
    (tmp_path / "measured").mkdir()
    world = Harness(tmp_path / "measured", validation_interval=1, loader=FakeLoader(held_out=(BOOKS, CODE)))
    world.run()
    assert (world.engine.asked, world.engine.counts) == (plain.engine.asked, plain.engine.counts)
    assert (world.loader.read, world.saves) == (plain.loader.read, plain.saves)


def test_a_pass_that_a_kill_or_a_drain_left_out_is_made_up_before_the_next_step(tmp_path: Path) -> None:
    world = Harness(tmp_path, interval=100, validation_interval=2, loader=FakeLoader(held_out=(BOOKS,)))
    state = RunState(step=1, consumed_samples=4, consumed_tokens=32, adam_t=1)
    ask(world.beats, 1, Word.DRAIN)
    end = world.run(state)
    assert (end.drained, end.state.step, world.measured()) == (True, 2, []), "a drain has no time for it"
    ask(world.beats, 2, Word.NONE)
    world.run(end.state)
    assert world.measured() == [2, 4, 6]
    world.run(end.state)
    assert world.measured() == [2, 4, 6, 4, 6], "what is on record for the checkpoint is not measured again"


def test_a_validation_line_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a later checkpoint is made, a line that a dying node lost would never be written again."""
    synced: list[int] = []
    monkeypatch.setattr("trainer.journal.os.fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    Harness(tmp_path, loader=FakeLoader(held_out=(BOOKS,))).run()
    assert synced[-1] == (tmp_path / "validation.jsonl").stat().st_ino


def test_a_torn_validation_line_does_not_count(tmp_path: Path) -> None:
    cycle_dir = tmp_path / "attempts" / "0001" / "cycles" / "0001"
    cycle_dir.mkdir(parents=True)
    (cycle_dir / "validation.jsonl").write_text('{"step": 6, "loss"')
    assert not validated(tmp_path, 6)


def test_steps_of_a_ramp_are_counted_as_what_they_are(tmp_path: Path) -> None:
    """4 samples a step, 8 from the ninth on; step 3 is passed over and its samples are drawn all the same."""

    def cost(consumed_samples: int) -> StepCost:
        n = 1 if consumed_samples < 8 else 2
        return replace(COST, samples=n * SAMPLES, tokens=n * TOKENS, flops=n * 10.0)

    world = Harness(tmp_path, train_steps=4)
    world.plan = replace(world.plan, cost=cost)
    end = world.run(RunState(skip_windows=((3, 3),)))
    assert (end.state.consumed_samples, end.state.consumed_tokens) == (24, 24 * 8)
    assert [line["consumed_samples"] for line in world.lines()] == [4, 8, 16, 24]
    assert [line["model_flops"] for line in world.lines()] == [10.0, 10.0, 0.0, 20.0]
    assert [asked["sample"] for asked in world.engine.asked] == [0, 4, 16]
    assert (world.beats.stats.samples_total, world.beats.stats.tokens_total) == (24, 24 * 8)
