"""Killed or out of space at any operation of a save: the newest complete checkpoint is found, and the two before."""

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from checkpoint_world import facts, filled_rank, make_specs, save_world
from crash_shim import Operation, fail_at_each, kill_at_each

from trainer.checkpoint.naming import CheckpointName, partial_name
from trainer.checkpoint.save import begin, commit, write_rank
from trainer.checkpoint.verify import choose_newest, problems
from trainer.mesh.topology import Topology

MESH = Topology(dp=2, pp=1, tp=1)
SPECS = make_specs(MESH, tied=True)
RANKS = [filled_rank(SPECS, MESH, rank, zero_stage=1) for rank in range(2)]
NEW = CheckpointName(50, (1, 1, 2))


def fresh_in(root: Path) -> Callable[[int], Path]:
    """Folders with the same two good checkpoints each; links, for nobody changes a file."""
    for step in (30, 40):
        save_world(root / "before", SPECS, MESH, step=step)
    return lambda number: shutil.copytree(root / "before", root / str(number), copy_function=os.link)


def save_by_hand(folder: Path) -> None:
    """What all ranks do, one after the other."""
    final, partial = folder / str(NEW), folder / partial_name(NEW)
    begin(final, partial)
    commit(partial, final, RANKS[0], facts(NEW), [asdict(write_rank(partial, shards)) for shards in RANKS])


def assert_safe(folder: Path) -> None:
    """The two before are whole, the newest whole one is found; a name that counts was never there before the whole."""
    before = [folder / str(CheckpointName(step, (1, 1, 1))) for step in (30, 40)]
    assert all(problems(path) == () for path in before)
    final = folder / str(NEW)
    assert not final.exists() or problems(final) == ()
    assert choose_newest(folder).path == (final if final.exists() else before[1])


def test_kill_minus_9_at_any_operation_of_a_save_leaves_the_previous_checkpoints(tmp_path: Path) -> None:
    """R1 (torchtitan#315, #4191)."""

    def check(folder: Path, died_at: Operation | None) -> None:
        assert_safe(folder)
        assert died_at is not None or (folder / str(NEW)).exists()

    operations = kill_at_each(fresh_in(tmp_path), save_by_hand, check)
    verbs = [operation.verb for operation in operations]
    assert verbs.count("write") > 6 * len(SPECS) and {"open", "write", "fsync", "mkdir", "rename", "replace"} <= {
        *verbs
    }


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_full_or_failing_disk_at_any_operation_of_a_save_leaves_the_previous_checkpoints(
    number: int, tmp_path: Path
) -> None:
    """R1, R2: metaseq#53."""

    def check(folder: Path, failed_at: Operation | None, raised: BaseException | None) -> None:
        assert_safe(folder)
        if failed_at == Operation("mkdir", "."):
            return  # it is there already
        assert (failed_at is None) == (raised is None), f"{failed_at} failed, and nobody was told"

    fail_at_each(fresh_in(tmp_path), save_by_hand, check, number=number)
