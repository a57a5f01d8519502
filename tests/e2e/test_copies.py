"""Copies beside a run that trains, and a run that goes on from one when all its checkpoints are gone."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_world import flip_byte
from local_runs import LocalRuns


@pytest.fixture
def world(tmp_path: Path) -> Iterator[LocalRuns]:
    copies = {"upload_to": f"file://{tmp_path}/copies", "export_interval": 100}
    made = LocalRuns(tmp_path, train_steps=100_000, interval=100, **copies)
    try:
        made.pawl("submit", "source.yaml")
        yield made
    finally:
        made.end()


def test_a_run_whose_checkpoints_were_purged_goes_on_from_its_newest_copy(world: LocalRuns) -> None:
    paths = world.paths("source")
    first = world.wait("source", "checkpoint_uploaded").data["name"]
    world.wait("source", "checkpoint_uploaded", lambda event: event.data["name"] != first)
    world.wait("source", "export")
    world.pawl("drain", "source")
    exported = sorted(paths.exports.glob("step-*"))
    assert exported and (exported[0] / "model.safetensors").is_file()
    copied = sorted(path.name for path in (world.root / "copies" / "source").iterdir())
    assert copied and copied[0] in world.pawl("ckpt", "copies", "source")

    flip_byte(world.root / "copies" / "source" / copied[-1] / "rank-00000.safetensors", 900)
    shutil.rmtree(paths.checkpoints)
    paths.checkpoints.mkdir()
    assert "goes on from the newest copy" in world.pawl("resume", "source")
    fetched = world.wait("source", "checkpoint_fetched").data["name"]
    started = world.wait("source", "cycle_started", lambda event: event.epoch.attempt == 2)
    assert started.data["resume_from"] == fetched == copied[-2], "the newest is damaged"
    world.wait("source", "checkpoint_committed", lambda event: event.epoch.attempt == 2)
    world.pawl("cancel", "source")
