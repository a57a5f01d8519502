"""Killed or out of space at any operation of a save: the newest complete checkpoint is found, and the two before."""

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
from checkpoint_world import facts, filled_rank, make_specs, save_world
from crash_shim import Operation, fail_at_each, kill_at_each

from trainer.checkpoint import save as save_module
from trainer.checkpoint.contents import Contents
from trainer.checkpoint.manifest import FileRecord
from trainer.checkpoint.naming import CheckpointName, partial_name
from trainer.checkpoint.save import begin, commit, write_rank
from trainer.checkpoint.saver import Label, Saver
from trainer.checkpoint.state import RunState
from trainer.checkpoint.together import SaveFailed
from trainer.checkpoint.verify import choose_newest, problems
from trainer.comm import solo
from trainer.mesh.context import Background
from trainer.mesh.topology import Topology
from trainer.outcome import is_storage_error

MESH = Topology(dp=2, pp=1, tp=1)
SPECS = make_specs(MESH, tied=True)[:4]  # cut by rows, by columns, not at all: each box is three operations
RANKS = [filled_rank(SPECS, MESH, rank, zero_stage=1) for rank in range(2)]
ALONE = filled_rank(SPECS, Topology(), 0, zero_stage=1)
NEW = CheckpointName(50, (1, 1, 2))


def fresh_in(root: Path) -> Callable[[int], Path]:
    """Folders with the same two good checkpoints each; links, for nobody changes a file."""
    for step in (30, 40):
        save_world(root / "before", SPECS, MESH, step=step)
    return lambda number: shutil.copytree(root / "before", root / str(number), copy_function=os.link)


def save_by_hand(folder: Path) -> None:
    """What two ranks do, one after the other."""
    final, begun = folder / str(NEW), folder / partial_name(NEW)
    begin(final, begun)
    commit(begun, final, RANKS[0], facts(NEW), [asdict(write_rank(begun, shards)) for shards in RANKS])


def save(folder: Path, *, waits: bool) -> None:
    """What the rank of a world of one does, in its thread, from a snapshot or the live state."""
    label = Label(
        checkpoints_dir=folder, epoch="a0001g01c0002", run="test", config_text="general: {}\n",
        model_config={"model_type": "llama"}, tokenizer=None,
    )  # fmt: skip
    saver = Saver(
        label, meeting=Background(world=solo()), shards=lambda: ALONE, compare=lambda step: None, is_async=True
    )
    saver.start(RunState(step=NEW.step), waits=waits)
    saver.collect()


def save_that_fails(folder: Path) -> None:
    """A disk that is full in the middle of the rank's file: what was made is removed again."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SaveFailed):
        patch.setattr(save_module, "write_contents", out_of_space)
        save(folder, waits=False)


def out_of_space(folder: Path, contents: Contents) -> FileRecord:
    (folder / contents.file).write_bytes(b"half")
    raise OSError(errno.ENOSPC, "No space left on device")


SAVES: dict[str, Callable[[Path], None]] = {
    "two ranks": save_by_hand,
    "beside training": partial(save, waits=False),
    "training waits": partial(save, waits=True),
}


def assert_safe(folder: Path) -> None:
    """The two before are whole, the newest whole one is found; a name that counts was never there before the whole."""
    before = [folder / str(CheckpointName(step, (1, 1, 1))) for step in (30, 40)]
    assert all(problems(path) == () for path in before)
    final = folder / str(NEW)
    assert not final.exists() or problems(final) == ()
    assert choose_newest(folder).path == (final if final.exists() else before[1])


@pytest.mark.parametrize("way", SAVES)
def test_kill_minus_9_at_any_operation_of_a_save_leaves_the_previous_checkpoints(way: str, tmp_path: Path) -> None:
    """R1 (torchtitan#315, #4191)."""

    def check(folder: Path, died_at: Operation | None) -> None:
        assert_safe(folder)
        assert died_at is not None or (folder / str(NEW)).exists()

    operations = kill_at_each(fresh_in(tmp_path), SAVES[way], check)
    verbs = [operation.verb for operation in operations]
    assert verbs.count("write") >= 3 * len(SPECS)
    assert {"open", "write", "fsync", "mkdir", "rename", "replace"} <= {*verbs}


def test_kill_minus_9_while_a_failed_save_is_cleared_away(tmp_path: Path) -> None:
    """R1: what is left is a folder that no reader looks at."""
    operations = kill_at_each(fresh_in(tmp_path), save_that_fails, lambda folder, died_at: assert_safe(folder))
    assert {"scandir", "unlink", "rmdir"} <= {operation.verb for operation in operations}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("way", SAVES)
def test_a_full_or_failing_disk_at_any_operation_of_a_save_leaves_the_previous_checkpoints(
    way: str, number: int, tmp_path: Path
) -> None:
    """R1, R2 (metaseq#53): whoever is told of the failure finds no half-made folder, or the checkpoint itself."""

    def check(folder: Path, failed_at: Operation | None, raised: BaseException | None) -> None:
        assert_safe(folder)
        if failed_at == Operation("mkdir", "."):
            return  # it is there already
        assert (failed_at is None) == (raised is None), f"{failed_at} failed, and nobody was told"
        if way != "two ranks" and raised is not None:
            assert isinstance(raised, SaveFailed) and is_storage_error(raised), "exit code 92"
            assert not (folder / partial_name(NEW)).exists()

    fail_at_each(fresh_in(tmp_path), SAVES[way], check, number=number)


@pytest.mark.parametrize("step", [40, 50])
def test_a_zombie_of_an_older_launch_that_commits_late_replaces_nothing(step: int, tmp_path: Path) -> None:
    """R1: it began the same step, or a later one, before the launch that went on, and ends after it."""
    zombie = CheckpointName(step, (1, 1, 1))
    late, newer = tmp_path / partial_name(zombie), CheckpointName(40, (1, 1, 2))
    begin(tmp_path / str(zombie), late)
    files = [asdict(write_rank(late, RANKS[0]))]
    save_world(tmp_path, SPECS, MESH, step=newer.step, epoch=newer.epoch)
    content = {path: path.read_bytes() for path in (tmp_path / str(newer)).iterdir()}
    assert choose_newest(tmp_path).path == tmp_path / str(newer), "half-written, it is not looked at"
    files.append(asdict(write_rank(late, RANKS[1])))
    commit(late, tmp_path / str(zombie), RANKS[0], facts(zombie), files)
    assert {path: path.read_bytes() for path in (tmp_path / str(newer)).iterdir()} == content
    assert problems(tmp_path / str(newer)) == problems(tmp_path / str(zombie)) == ()
    assert choose_newest(tmp_path).path == tmp_path / str(max(newer, zombie)), "of one step, the later launch's"
