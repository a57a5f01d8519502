"""Real ranks: a saved run goes on, on the same mesh or another; a failure anywhere is the same error everywhere."""

import errno
from pathlib import Path

import pytest
from dist.axes import Case
from dist.case import make_engine, train
from dist.pool import Pool, Ranks

from trainer.checkpoint import save as save_module
from trainer.checkpoint.load import load_checkpoint
from trainer.checkpoint.saver import save_checkpoint
from trainer.checkpoint.state import RunState
from trainer.checkpoint.together import SaveFailed
from trainer.checkpoint.verify import choose_newest, problems
from trainer.engine import Engine
from trainer.errors import CheckpointInvalid, TrainerError
from trainer.outcome import ending_of

STATE = RunState(step=2, consumed_samples=16, consumed_tokens=256, adam_t=1, skip_windows=((5, 6),))
NAME = "step-000000002.a0001g01c0001"

LARGE = Case.of(dp=2, pp=2, tp=2)
ONE = Case.of()
BIASED = Case.of(family="qwen3", bias=True)  # vectors that tp cuts, and vectors that it does not
PAIRS = [
    (LARGE, LARGE),
    (LARGE, ONE),
    (ONE, LARGE.but(zero=0)),
    (LARGE.but(zero=0), Case.of(dp=2, tp=2)),
    (Case.of(pp=2, tp=2, tied=False), Case.of(dp=2, pp=2, tied=False, bucket=100)),
    (BIASED.but(dp=2, tp=2, bucket=100, sp=True), BIASED.but(pp=2)),
    (BIASED.but(pp=2), BIASED.but(tp=2, zero=0)),
]


def steps(engine: Engine, case: Case, first: int, last: int) -> list[tuple[float, float]]:
    return [(result.loss, result.grad_norm) for result in train(engine, case, range(first, last))]


def save(engine: Engine, folder: str) -> str:
    return save_checkpoint(
        engine,
        STATE,
        checkpoints_dir=Path(folder),
        epoch="a0001g01c0001",
        run="test",
        config_text="general: {}\n",
        tokenizer=None,
    ).name


def train_and_save(ranks: Ranks, case: Case, folder: str) -> list[tuple[float, float]]:
    """Two steps, a checkpoint, two more; returns the last two."""
    engine = make_engine(ranks, case)
    steps(engine, case, 0, 2)
    assert save(engine, folder) == NAME
    return steps(engine, case, 2, 4)


def resume(ranks: Ranks, case: Case, folder: str) -> list[tuple[float, float]]:
    engine = make_engine(ranks, case)
    assert load_checkpoint(Path(folder) / NAME, engine) == STATE
    return steps(engine, case, 2, 4)


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=lambda case: str(case))
def test_a_run_goes_on_as_if_never_stopped(before: Case, after: Case, pool: Pool, tmp_path: Path) -> None:
    straight = pool.run(before.topology, train_and_save, before, str(tmp_path))[0]
    resumed = pool.run(after.topology, resume, after, str(tmp_path))
    assert problems(tmp_path / NAME) == ()
    for result in resumed:
        if before == after:
            assert result == straight
        else:
            assert result == [pytest.approx(pair, rel=1e-10) for pair in straight]


def outcome_of_load(ranks: Ranks, case: Case, folder: str) -> tuple[str, str]:
    try:
        load_checkpoint(Path(folder) / NAME, make_engine(ranks, case))
    except CheckpointInvalid as error:
        return type(error).__name__, str(error.bad_file)
    return "loaded", ""


@pytest.mark.parametrize("name", ["rank-00003.safetensors", "manifest.json"])
def test_every_rank_names_the_same_damaged_file(name: str, pool: Pool, tmp_path: Path) -> None:
    case = Case.of(dp=2, tp=2)
    pool.run(case.topology, train_and_save, case, str(tmp_path))
    bad = tmp_path / NAME / name
    data = bytearray(bad.read_bytes())
    data[len(data) // 2] ^= 1
    bad.write_bytes(data)
    answers = pool.run(case.topology, outcome_of_load, case, str(tmp_path))
    assert set(answers) == {("CheckpointInvalid", str(bad))}


def save_with_an_error_on_rank_1(ranks: Ranks, case: Case, folder: str, error: Exception) -> tuple[str, str, int]:
    engine = make_engine(ranks, case)
    plain = save_module.write_tensors

    def full(path: Path, *args: object, **kwargs: object) -> object:
        raise error

    try:
        if ranks.rank == 1:
            save_module.write_tensors = full  # type: ignore[assignment]
        save(engine, folder)
    except TrainerError as error:
        return type(error).__name__, str(error), ending_of(error).exit_code
    finally:
        save_module.write_tensors = plain
    return "saved", "", 0


@pytest.mark.parametrize(
    ("error", "says", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device", 92),
        (RuntimeError("device-side assert"), "device-side assert", 1),
        (MemoryError(), "MemoryError()", 1),
    ],
    ids=["disk", "device", "memory"],
)
def test_an_error_of_one_rank_fails_the_save_on_all_and_leaves_nothing_half_made(
    error: Exception, says: str, code: int, pool: Pool, tmp_path: Path
) -> None:
    case = Case.of(dp=2)
    answers = pool.run(case.topology, save_with_an_error_on_rank_1, case, str(tmp_path), error)
    assert {(kind, number) for kind, _, number in answers} == {(SaveFailed.__name__, code)}
    assert all(
        (says in text or rank == 1) and "Earlier checkpoints are untouched" in text
        for rank, (_, text, _) in enumerate(answers)
    )
    assert list(tmp_path.iterdir()) == [] and choose_newest(tmp_path).path is None
