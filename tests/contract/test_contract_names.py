"""Names and places in the run directory: both packages compute them apart, and come to the same."""

from argparse import Namespace
from pathlib import Path

import pytest

from orchestrator.state import rundir
from orchestrator.state.epochs import PLAIN_EPOCH
from orchestrator.state.epochs import Epoch as AgentEpoch
from trainer.checkpoint import naming
from trainer.launch import Launch, read_launch
from trainer.outcome import outcome_path
from trainer.records import CHECKPOINT_NAME, UNSUPERVISED, Epoch

EPOCHS = [(1, 1, 1), (3, 1, 2), (9999, 99, 9999), (12345, 100, 12345)]


@pytest.mark.parametrize("epoch", EPOCHS)
def test_epoch_text(epoch: tuple[int, int, int]) -> None:
    attempt, generation, cycle = epoch
    text = Epoch(attempt=attempt, generation=generation, cycle=cycle).text
    assert text == AgentEpoch(*epoch).text
    assert naming.parse_epoch(text) == epoch
    read = AgentEpoch.parse(text)
    assert read is not None
    assert read.to_list() == list(epoch)


def test_epochs_sort_the_same() -> None:
    ours = sorted(Epoch(attempt=a, generation=g, cycle=c) for a, g, c in EPOCHS)
    assert [epoch.text for epoch in ours] == [epoch.text for epoch in sorted(AgentEpoch(*epoch) for epoch in EPOCHS)]


def test_without_a_cycle_file() -> None:
    assert UNSUPERVISED.text == PLAIN_EPOCH.text == "a0000g00c0000"


@pytest.mark.parametrize("step", [1, 12500, 10**9])
def test_checkpoint_names(step: int) -> None:
    written = str(naming.CheckpointName(step, (3, 1, 2)))
    read = rundir.CheckpointName.parse(written)
    assert read is not None
    assert (read.step, read.epoch.to_list(), read.text) == (step, [3, 1, 2], written)
    assert CHECKPOINT_NAME.fullmatch(written)
    partial = naming.partial_name(naming.CheckpointName(step, (3, 1, 2)))
    assert rundir.classify_entry(partial) == (rundir.EntryKind.PARTIAL, read)
    assert rundir.RunPaths(Path("/r")).partial(written).name == partial


def launched(paths: rundir.RunPaths, *, attempt: int, cycle: int, rank: int) -> Launch:
    args = Namespace(
        config_file=paths.config, run_dir=paths.root, cycle=paths.cycle_file(attempt, cycle), shm=Path("/dev/shm/x")
    )
    return read_launch(args, {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "64", "PAWL_NODE": "node1"})


def test_places_in_the_run_directory(tmp_path: Path) -> None:
    paths = rundir.RunPaths(tmp_path)
    launch = launched(paths, attempt=3, cycle=1, rank=42)
    assert launch.cycle_dir == paths.cycle(3, 1)
    assert launch.cycle_dir / "train.jsonl" == paths.train_log(3, 1)
    assert launch.cycle_dir / "validation.jsonl" == paths.validation_log(3, 1)
    assert outcome_path(launch.cycle_dir, launch.rank) == paths.outcome(3, 1, 42)
    assert rundir.parse_outcome_name(outcome_path(launch.cycle_dir, launch.rank).name) == 42
    assert launch.stacks_file == paths.stacks(3, 1, 42)
    assert launch.checkpoints_dir == paths.checkpoints
    assert launch.node == "node1"
