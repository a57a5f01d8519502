"""Copies beside a run that trains, and a run that goes on from one when all its checkpoints are gone."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
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
    world.wait("source", "checkpoint_uploaded")
    world.wait("source", "export")
    world.pawl("drain", "source")
    exported = sorted(paths.exports.glob("step-*"))
    assert exported and (exported[0] / "model.safetensors").is_file()
    copied = sorted(path.name for path in (world.root / "copies" / "source").iterdir())
    assert copied and copied[0] in world.pawl("ckpt", "copies", "source")

    shutil.rmtree(paths.checkpoints)
    paths.checkpoints.mkdir()
    assert "goes on from the newest copy" in world.pawl("resume", "source")
    fetched = world.wait("source", "checkpoint_fetched").data["name"]
    started = world.wait("source", "cycle_started", lambda event: event.epoch.attempt == 2)
    assert started.data["resume_from"] == fetched and fetched in copied
    world.wait("source", "checkpoint_committed", lambda event: event.epoch.attempt == 2)
    world.pawl("cancel", "source")
