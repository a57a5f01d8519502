"""Saves beside training, on real ranks: the state of their border whatever follows, and one outcome on all ranks."""

import errno
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from dist.axes import Case
from dist.case import make_engine, train
from dist.pool import Pool, Ranks

from trainer.checkpoint import save as save_module
from trainer.checkpoint.saver import Saver, engine_saver, save_checkpoint
from trainer.checkpoint.state import RunState
from trainer.checkpoint.together import SaveFailed
from trainer.checkpoint.verify import choose_newest, problems
from trainer.comm import Group
from trainer.engine import Engine
from trainer.mesh.context import Background
from trainer.outcome import ending_of

EPOCH = "a0001g01c0001"
CASES = [
    Case.of(),
    Case.of(dp=2, pp=2, tp=2),
    Case.of(dp=2, tp=2, zero=0, dtype="bfloat16"),
    Case.of(dp=2, pp=2, schedule="zb-v", tied=False, bucket=100),
]


def saver_of(ranks: Ranks, engine: Engine, folder: Path) -> Saver:
    """One that saves beside training."""
    world = engine.ctx.world.ranks
    pg = ranks.background(world) if len(world) > 1 else None
    return engine_saver(
        engine, background=Background(world=Group(ranks=world, rank=ranks.rank, pg=pg)), **label(folder)
    )


def label(folder: Path) -> dict[str, Any]:
    return {
        "checkpoints_dir": folder, "epoch": EPOCH, "run": "test", "config_text": "general: {}\n", "tokenizer": None,
    }  # fmt: skip


def state_after(step: int) -> RunState:
    return RunState(step=step, consumed_samples=8 * step, consumed_tokens=128 * step, adam_t=step)


@contextmanager
def write_calls(act: Callable[[], None]) -> Iterator[None]:
    """`act` is called before a rank's file is written."""
    plain = save_module.write_tensors

    def write(*args: Any, **named: Any) -> Any:
        act()
        return plain(*args, **named)

    save_module.write_tensors = write
    try:
        yield
    finally:
        save_module.write_tensors = plain


def save_both_ways(ranks: Ranks, case: Case, folder: str) -> None:
    """Step 2 saved while training waits, and beside steps 3 to 5, whose end its writing waits for; step 5 likewise."""
    engine = make_engine(ranks, case)
    saver = saver_of(ranks, engine, Path(folder) / "beside")
    for step in (2, 5):
        train(engine, case, range(0, 2) if step == 2 else range(5, 6))
        save_checkpoint(engine, state_after(step), **label(Path(folder) / "waiting"))
        trained = threading.Event()
        with write_calls(lambda event=trained: event.wait(60)):  # type: ignore[misc]
            saver.start(state_after(step), waits=False)
            train(engine, case, range(2, 5))
            assert not saver.is_done(), "written from the snapshot, after three more steps"
            trained.set()
            assert saver.collect().step == step


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_save_beside_three_more_steps_is_the_waiting_one_byte_for_byte(
    case: Case, pool: Pool, tmp_path: Path
) -> None:
    """Live tensors, step and run state move on; the snapshot's buffer is used again (NVRx#376, Bridge#3267)."""
    pool.run(case.topology, save_both_ways, case, str(tmp_path))
    for step in (2, 5):
        waiting, beside = (tmp_path / way / f"step-{step:09d}.{EPOCH}" for way in ("waiting", "beside"))
        assert problems(beside) == ()
        names = sorted(path.name for path in beside.iterdir())
        assert names == sorted(path.name for path in waiting.iterdir()) and len(names) == case.topology.world_size + 3
        for name in names:
            if name != "manifest.json":
                assert (beside / name).read_bytes() == (waiting / name).read_bytes(), name
        records = [json.loads((folder / "manifest.json").read_text()) for folder in (waiting, beside)]
        assert len({json.dumps({**r, "created_unix": 0, "xxh3": ""}, sort_keys=True) for r in records}) == 1


def train_until_told(ranks: Ranks, case: Case, folder: str, error: Exception | None) -> tuple[int, str, str, int]:
    """A good checkpoint, then one whose writing fails on the last rank; (step, kind, text, exit code) of the end.

    The other ranks' files take until step 4, so that nobody could know before.
    """
    engine = make_engine(ranks, case)
    saver = saver_of(ranks, engine, Path(folder))
    saver.start(state_after(1), waits=False)
    saver.collect()
    late, last = threading.Event(), ranks.rank == case.topology.world_size - 1

    def write() -> None:
        if last and error is not None:
            raise error
        late.wait(60)

    with write_calls(write):
        saver.start(state_after(2), waits=False)
        for step in range(2, 40):
            if step == 4:
                late.set()
            batch_result = train_voting(engine, case, step, saver)
            if batch_result:
                try:
                    return step, "saved", saver.collect().name, 0
                except SaveFailed as failed:
                    return step, type(failed).__name__, str(failed), ending_of(failed).exit_code
    raise AssertionError("nobody was told within 40 steps")


def train_voting(engine: Engine, case: Case, step: int, saver: Saver) -> bool:
    """One step; whether all ranks brought that their part of the save has ended."""
    from dist.case import local_batch

    result = engine.train_step(
        local_batch(case, step % 8, engine.ctx.get_dp_rank()), lr=1e-3, weight_decay=0.1, adam_t=step,
        save_done=saver.is_done(),
    )  # fmt: skip
    return result.save_done


@pytest.mark.parametrize("case", [Case.of(dp=2, pp=2, tp=2), Case.of(dp=3)], ids=str)
def test_a_failing_write_on_one_rank_ends_the_save_on_all_at_the_same_step(
    case: Case, pool: Pool, tmp_path: Path
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    answers = pool.run(case.topology, train_until_told, case, str(tmp_path), full)
    assert {(kind, code) for _, kind, _, code in answers} == {("SaveFailed", 92)}
    (step,) = {step for step, _, _, _ in answers}
    assert step >= 4
    assert all(
        "No space left on device" in text and "Earlier checkpoints are untouched" in text for *_, text, _ in answers
    )
    (good,) = tmp_path.iterdir()
    assert good.name == f"step-000000001.{EPOCH}" and choose_newest(tmp_path).path == good


def test_ranks_learn_of_a_good_save_at_the_same_step(pool: Pool, tmp_path: Path) -> None:
    case = Case.of(dp=2, tp=2)
    answers = pool.run(case.topology, train_until_told, case, str(tmp_path), None)
    assert len({step for step, *_ in answers}) == 1 and answers[0][0] >= 4
    assert {name for _, _, name, _ in answers} == {f"step-000000002.{EPOCH}"}
    assert [problems(path) for path in sorted(tmp_path.iterdir())] == [(), ()]
