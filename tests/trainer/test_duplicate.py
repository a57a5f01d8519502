"""A duplicate is the same checkpoint under another run's name: whole, verified, independent of its source."""

import errno
import json
import os
import shutil

import pytest
import tiny_run
from checkpoint_world import flip_byte, make_specs, save_world
from crash_shim import STORAGE_ERRORS, fail_at_each, kill_at_each

from trainer.checkpoint.reader import BoxReader, open_checkpoint
from trainer.checkpoint.verify import problems
from trainer.cli import main
from trainer.duplicate import duplicate as copy_of
from trainer.errors import CheckpointInvalid, ConfigError, TrainerError
from trainer.mesh.topology import Topology

MESH = Topology(dp=2, tp=2)
NAME = "step-000000040.a0000g00c0000"


@pytest.fixture
def checkpoint(tmp_path):
    return save_world(tmp_path / "source", make_specs(MESH, tied=True), MESH)


def duplicate(checkpoint, folder, *more):
    return main(["duplicate", str(checkpoint), "--to", str(folder), *more])


def test_it_belongs_to_the_new_run_and_outlives_its_source(checkpoint, tmp_path, capsys):
    assert duplicate(checkpoint, tmp_path / "new", "--run", "other", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    source = open_checkpoint(checkpoint)
    before = BoxReader(source).tensor("model.norm.weight").copy()
    assert made["digest"] == source.manifest.to_json()["xxh3"] and made["name"] == NAME
    assert (made["linked"], made["copied"]) == (len(source.manifest.files), 0)
    shutil.rmtree(checkpoint)
    new = open_checkpoint(tmp_path / "new" / NAME)
    assert (new.manifest.run, new.manifest.epoch, new.manifest.state) == (
        "other",
        "a0000g00c0000",
        source.manifest.state,
    )
    assert problems(new.path) == ()
    assert (BoxReader(new).tensor("model.norm.weight") == before).all()
    assert os.listdir(tmp_path / "new") == [NAME]


def test_without_a_run_it_stays_what_it_is(checkpoint, tmp_path, capsys):
    assert duplicate(checkpoint, tmp_path / "base") == 0
    assert "verified" in capsys.readouterr().out
    new = open_checkpoint(tmp_path / "base" / checkpoint.name)
    assert new.manifest == open_checkpoint(checkpoint).manifest


def test_where_files_cannot_be_linked_they_are_copied(checkpoint, tmp_path, monkeypatch, capsys):
    def link(*_args, **_kwargs):
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "link", link)
    assert duplicate(checkpoint, tmp_path / "new", "--run", "other", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert made["linked"] == 0 and problems(tmp_path / "new" / NAME) == ()
    flip_byte(checkpoint / "rank-00000.safetensors", 900)
    assert problems(tmp_path / "new" / NAME) == ()


def test_a_damaged_source_is_named_and_nothing_is_left(checkpoint, tmp_path, capsys):
    bad = checkpoint / "rank-00001.safetensors"
    flip_byte(bad, bad.stat().st_size - 3)
    assert duplicate(checkpoint, tmp_path / "new", "--run", "other") == CheckpointInvalid.exit_code
    assert str(bad) in capsys.readouterr().err and os.listdir(tmp_path / "new") == []


def test_a_taken_name_and_a_full_disk_are_one_error_each(checkpoint, tmp_path, monkeypatch, capsys):
    (tmp_path / "new" / NAME).mkdir(parents=True)
    assert duplicate(checkpoint, tmp_path / "new", "--run", "other") == 2
    assert "exists already" in capsys.readouterr().err
    real = os.fsync

    def full(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert duplicate(checkpoint, tmp_path / "full", "--run", "other") == 2
    monkeypatch.setattr(os, "fsync", real)
    assert "No space left" in capsys.readouterr().err and os.listdir(tmp_path / "full") == []


def test_another_model_is_refused_with_the_first_tensor_that_differs(checkpoint, tmp_path, capsys):
    config = tiny_run.make(tmp_path)
    assert duplicate(checkpoint, tmp_path / "new", "--run", "other", "--config", str(config)) == ConfigError.exit_code
    error = capsys.readouterr().err
    assert "tensors differ" in error and "Shapes cannot change" in error and not (tmp_path / "new").exists()


def left_over(checkpoint, folder):
    """What a fork that died leaves: the source as it was, and a whole checkpoint or none."""
    assert problems(checkpoint) == ()
    committed = [entry for entry in folder.iterdir() if not entry.name.startswith(".")] if folder.exists() else []
    assert [entry.name for entry in committed] in ([], [NAME])
    assert all(problems(entry) == () for entry in committed)


@pytest.fixture
def small(tmp_path):
    """One file of tensors: each operation is gone through apart."""
    return save_world(tmp_path / "source", make_specs(Topology(), tied=True), Topology())


def test_a_kill_at_any_operation_leaves_a_whole_one_or_none(small, tmp_path):
    operations = kill_at_each(
        lambda at: tmp_path / f"kill-{at}",
        lambda folder: copy_of(open_checkpoint(small), folder, run="other"),
        lambda folder, _: left_over(small, folder),
    )
    assert {"mkdir", "write", "rename", "fsync"} <= {verb for verb, _ in operations}


@pytest.mark.parametrize("number", STORAGE_ERRORS)
def test_an_error_at_any_operation_leaves_nothing_half_made(small, tmp_path, number):
    def check(folder, _stopped, raised):
        left_over(small, folder)
        assert raised is None or isinstance(raised, TrainerError)
        assert not list(folder.glob(".*"))

    fail_at_each(
        lambda at: tmp_path / f"error-{at}",
        lambda folder: copy_of(open_checkpoint(small), folder, run="other"),
        check,
        number=number,
    )
