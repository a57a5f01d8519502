"""Forks that train: unchanged they are bit for bit the source going on; changed they do what was asked.

One rank, a real supervisor, agent and trainer; the source is finished, and its folder of step 4 is gone afterwards.
"""

import json
from collections.abc import Iterator

import pytest
from local_runs import LocalRuns

LR = "optimizer.learning_rate_scheduler.learning_rate"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRuns]:
    made = LocalRuns(tmp_path_factory.mktemp("fork"), train_steps=6, interval=2, keep_last=3)
    try:
        made.pawl("submit", "source.yaml")
        yield made
    finally:
        made.end()


def test_forks_of_a_finished_run(world: LocalRuns) -> None:
    source = world.steps("source")
    layout = ("slurm.ranks_per_node=2", "parallelism.pp=2", "tokens.train_steps=8", f"{LR}=0.005")
    world.pawl("fork", "source@4", "--run", "same")
    world.pawl("fork", "source@4", "--run", "other", *(word for change in layout for word in ("--set", change)))
    world.pawl("fork", "source@4", "--run", "weights", "--weights-only", "--set", "tokens.train_steps=2")
    folder = next(world.paths("source").checkpoints.glob("step-000000004.*"))
    for file in folder.iterdir():
        file.unlink()

    same = world.steps("same")
    picked = ("loss", "norm", "lr", "consumed_samples", "tokens")
    assert {n: [line[key] for key in picked] for n, line in same.items()} == {
        n: [source[n][key] for key in picked] for n in (5, 6)
    }
    found = json.loads(world.pawl("ckpt", "diff", "source@6", "same@6", "--json"))
    assert (found["tensors"], found["num_compared"]) == ([], 60)
    assert found["config"] == [["general.run", "source", "same"]]

    other = world.steps("other")
    assert sorted(other) == [5, 6, 7, 8]
    assert [line["consumed_samples"] for line in other.values()] == [20, 24, 28, 32]
    assert float.fromhex(other[5]["loss"]) == pytest.approx(float.fromhex(source[5]["loss"]), rel=1e-5)
    assert other[5]["lr"] < 0.005 and other[5]["lr"] != source[5]["lr"]
    assert "pp 2" in world.pawl("ckpt", "ls", "other")

    weights = world.steps("weights")
    assert sorted(weights) == [1, 2] and weights[1]["consumed_samples"] == 4
    assert weights[1]["loss"] != source[1]["loss"]
