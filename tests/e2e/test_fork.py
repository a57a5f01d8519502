"""Forks that train: unchanged they are bit for bit the source going on; changed they do what was asked.

One rank, a real supervisor, agent and trainer; the source is finished, and its folder of step 4 is gone afterwards.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import yaml

from orchestrator.agent import proc
from orchestrator.state.ledger import read_all
from orchestrator.state.rundir import RunPaths

LR = "optimizer.learning_rate_scheduler.learning_rate"


class World:
    """A folder of runs, and the public command."""

    def __init__(self, root: Path) -> None:
        self.root = root
        config = yaml.safe_load(tiny_run.make(root, "source", train_steps=6, interval=2).read_text())
        config["general"]["run"] = "source"
        config["checkpoints"]["keep_last"] = 3
        config["slurm"] = {"nodes": 1, "ranks_per_node": 1, "gpu_request": "none", "env": {"CUDA_VISIBLE_DEVICES": ""}}
        config["recovery"] = {"beat_interval_s": 2.0, "backoff_s": [0]}
        config["launcher"] = {"kind": "local", "threads_per_rank": 1}
        (root / "source.yaml").write_text(yaml.safe_dump(config))

    def pawl(self, *words: str) -> str:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "PAWL_"))}
        command = [sys.executable, "-m", "orchestrator", *words, "--runs-root", str(self.root / "runs")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=self.root)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def paths(self, name: str) -> RunPaths:
        return RunPaths(self.root / "runs" / name)

    def nonces(self) -> list[str]:
        events = [event for folder in (self.root / "runs").iterdir() for event in read_all(folder)]
        return [str(event.data["nonce"]) for event in events if event.kind == "attempt_intent"]

    def steps(self, name: str, *, limit_s: float = 180.0) -> dict[int, dict[str, Any]]:
        """Wait for the run's end; its lines by step, loss and norm as bits."""
        deadline = time.monotonic() + limit_s
        while not [event for event in read_all(self.paths(name).root) if event.kind == "run_done"]:
            assert time.monotonic() < deadline, self.pawl("explain", name)
            time.sleep(0.1)
        lines = map(json.loads, self.paths(name).train_log(1, 1).read_text().splitlines())
        return {line["step"]: {**line, "loss": line["loss"].hex(), "norm": line["grad_norm"].hex()} for line in lines}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("fork"))
    try:
        made.pawl("submit", "source.yaml")
        yield made
    finally:
        for nonce in made.nonces():
            proc.kill_all(lambda nonce=nonce: proc.find(nonce=nonce))  # type: ignore[misc]
            for left in Path("/dev/shm").glob(f"pawl-*-{nonce}-*"):
                left.unlink()


def test_forks_of_a_finished_run(world: World) -> None:
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
