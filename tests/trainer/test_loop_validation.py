"""When the loop measures held-out sets, and what it writes of them."""

import json
import os
from pathlib import Path

import pytest
from loop_world import BOOKS, CODE, FakeLoader, Harness, ask

from trainer.beat import Phase, Word
from trainer.checkpoint.state import RunState
from trainer.data.batch import StepBatch
from trainer.data.loader import HeldOut
from trainer.journal import validated


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
