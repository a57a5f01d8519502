"""Real runs of one rank on this machine, by the public command; supervisor, agent and trainer are the real ones."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny_run
import yaml

from orchestrator.agent import proc
from orchestrator.state.ledger import read_all
from orchestrator.state.records import Event
from orchestrator.state.rundir import RunPaths


class LocalRuns:
    """A folder of runs, and the public command. `source.yaml` is the config of run `source`."""

    def __init__(self, root: Path, *, train_steps: int, interval: int, **checkpoints: object) -> None:
        self.root = root
        config = yaml.safe_load(tiny_run.make(root, "source", train_steps=train_steps, interval=interval).read_text())
        config["general"]["run"] = "source"
        config["checkpoints"] |= checkpoints
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

    def wait(self, name: str, kind: str, found: Callable[[Event], bool] = lambda event: True) -> Event:
        """The first line of the ledger that is asked for."""
        deadline = time.monotonic() + 180.0
        while True:
            for event in read_all(self.paths(name).root):
                if event.kind == kind and found(event):
                    return event
            assert time.monotonic() < deadline, self.pawl("explain", name)
            time.sleep(0.1)

    def steps(self, name: str) -> dict[int, dict[str, Any]]:
        """Wait for the run's end; its lines by step, loss and norm as bits."""
        self.wait(name, "run_done")
        lines = map(json.loads, self.paths(name).train_log(1, 1).read_text().splitlines())
        return {line["step"]: {**line, "loss": line["loss"].hex(), "norm": line["grad_norm"].hex()} for line in lines}

    def end(self) -> None:
        """Kill what still runs and free its shared memory."""
        for nonce in self.nonces():
            proc.kill_all(lambda nonce=nonce: proc.find(nonce=nonce))  # type: ignore[misc]
            for left in Path("/dev/shm").glob(f"pawl-*-{nonce}-*"):
                left.unlink()
