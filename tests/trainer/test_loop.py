"""The loop with an engine of a few lines: order of phases, when it saves, what it counts, and how it stops."""

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from loop_world import COST, DP, SAMPLES, TOKENS, FakeEngine, FakeLoader, FakeResult, Harness, Saved, ask, valid

from trainer.beat import PROFILE, PROFILE_AT, Phase, Word
from trainer.checkpoint.state import RunState
from trainer.errors import DataError, DesyncError, NonFiniteError
from trainer.loop import in_windows
from trainer.throughput import StepCost


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
    assert world.windows == [2, 5], "all wait while recorders come up, and while traces are written"
    assert world.beats._beat.profile_ack == 1
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
    assert [state.step for state in world.saves] == [4] and world.windows == [1, 4]
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
        return Saved(name="step", step=state.step)

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
