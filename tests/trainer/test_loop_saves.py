"""Saves beside training: when the loop begins one, waits for it, learns how it went, and what is counted."""

import errno
import math
from pathlib import Path

import pytest
from loop_world import FakeEngine, FakeResult, Harness, ask

from trainer.beat import Phase, Word
from trainer.checkpoint.state import RunState
from trainer.checkpoint.together import SaveFailed
from trainer.errors import DesyncError, NonFiniteError

FULL = SaveFailed("The checkpoint could not be written: No space left on device")
FULL.__cause__ = OSError(errno.ENOSPC, "No space left on device")


def steps_of(world: Harness) -> list[int]:
    return [state.step for state in world.saves]


def test_a_save_is_collected_at_a_later_border_and_counted_once_then(tmp_path: Path) -> None:
    world = Harness(tmp_path, train_steps=6, interval=3, save_steps=1)
    known: list[tuple[int, int, int, list[str]]] = []

    def note(result: FakeResult) -> FakeResult:
        stats = world.beats.stats
        saves = stats.checkpoint_saves_total
        known.append((len(world.engine.asked), saves, stats.checkpoint_last_step, list(world.committed)))
        return result

    world.engine.after = note
    end = world.run()
    third = "step-000000003.a0001g01c0001"
    # Done when step 4 is; all ranks bring that to the reduction of step 5 and collect at its border.
    assert known == [(step, 0, 0, []) for step in range(1, 6)] + [(6, 1, 3, [third])]
    assert steps_of(world) == [3, 6] and world.committed == [third, end.checkpoint]
    assert (world.beats.stats.checkpoint_saves_total, world.beats.stats.checkpoint_last_step) == (2, 6)
    assert world.saver.waited == [6] and world.said == [], "only for the last"
    assert [line["save_s"] is None for line in world.lines()] == [True, True, False, True, True, False]


def test_a_save_that_is_due_while_one_is_under_way_waits_for_it_and_says_so(tmp_path: Path) -> None:
    world = Harness(tmp_path, train_steps=6, interval=2, save_steps=3)
    world.run()
    assert steps_of(world) == [2, 4, 6] and world.saver.waited == [2, 4, 6]
    assert [line.split(":")[0] for line in world.said] == ["step 4", "step 6"]
    assert "checkpoint of step 2 was still being written" in world.said[0]
    assert "checkpoints.checkpoint_interval" in world.said[0] and "faster storage" in world.said[0]


@pytest.mark.parametrize("word", [Word.SAVE, Word.DRAIN])
def test_a_request_waits_for_the_save_under_way_and_for_its_own(word: Word, tmp_path: Path) -> None:
    world = Harness(tmp_path, train_steps=9, interval=4, save_steps=50)

    def ask_at_six(result: FakeResult) -> FakeResult:
        if len(world.engine.asked) == 5:
            ask(world.beats, 1, word)
        return result

    world.engine.after = ask_at_six
    end = world.run()
    assert steps_of(world)[:2] == [4, 6] and end.drained is (word is Word.DRAIN)
    assert world.beats._beat.control_ack == 1
    assert steps_of(world) == [4, 6] + [8, 9] * (word is Word.SAVE), "each border once"


def test_a_drain_at_the_border_of_a_save_saves_once_and_waits_for_it(tmp_path: Path) -> None:
    world = Harness(tmp_path, train_steps=9, interval=1, save_steps=50)
    ask(world.beats, 1, Word.DRAIN)
    end = world.run()
    assert end.drained and steps_of(world) == [1] and end.checkpoint == world.committed[0]


def test_a_failed_save_ends_the_run_at_the_border_where_all_know_and_its_step_has_a_line(tmp_path: Path) -> None:
    world = Harness(tmp_path, train_steps=9, interval=3, save_steps=1, save_error=FULL)
    with pytest.raises(SaveFailed, match="No space left"):
        world.run()
    assert [line["step"] for line in world.lines()] == [1, 2, 3, 4, 5]
    assert (world.saves, world.committed, world.beats.stats.checkpoint_saves_total) == ([], [], 0)


def test_ranks_collect_when_all_are_done_and_not_before(tmp_path: Path) -> None:
    """The reduction says so: a rank whose own part has ended long ago trains on until then."""
    engine = FakeEngine(after=lambda result: FakeResult(loss=result.loss, save_done=len(engine.asked) == 7))
    world = Harness(tmp_path, train_steps=9, interval=4, save_steps=0, engine=engine)
    seen: list[int] = []
    save = world.save

    def noting(state: RunState, before_commit: object) -> object:
        seen.append(len(engine.asked))
        return save(state, before_commit)  # type: ignore[arg-type]

    world.save = noting  # type: ignore[method-assign, assignment]
    world.run()
    assert seen == [7, 9, 9] and world.saver.waited == []


def test_a_run_that_ends_on_all_ranks_lets_the_save_under_way_finish(tmp_path: Path) -> None:
    def fifth_is_nan(result: FakeResult) -> FakeResult:
        return result if len(world.engine.asked) < 5 else FakeResult(loss=math.nan, grad_norm=math.nan, finite=False)

    world = Harness(tmp_path, train_steps=9, interval=3, save_steps=50)
    world.engine.after = fifth_is_nan
    with pytest.raises(NonFiniteError):
        world.run()
    assert steps_of(world) == [3] and world.beats.stats.checkpoint_last_step == 3
    assert world.beats.phase is Phase.STEP, "the outcome names the phase of the failure"


def test_a_save_that_fails_while_the_run_ends_is_logged_and_hides_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = Harness(
        tmp_path, train_steps=9, interval=3, save_steps=50, save_error=FULL, replica_interval=1, unequal_at=5
    )
    with pytest.raises(DesyncError):
        world.run()
    assert "save of step 3" in caplog.text and "No space left" in caplog.text
