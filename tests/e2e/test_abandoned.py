"""Supervisor and agents are killed at once: the ranks, which nobody watches any more, end themselves and clean up."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_run
import yaml

from orchestrator.agent import proc
from orchestrator.state.ledger import read_all
from orchestrator.state.records import Claim, OutcomeKind, parse_attempt_nodes, parse_claim, parse_outcome
from orchestrator.state.rundir import RunPaths

LOST_S = 2.0


@pytest.fixture
def run(tmp_path: Path):
    config = yaml.safe_load(tiny_run.make(tmp_path, "left", dp=2, train_steps=100_000, interval=1000).read_text())
    config["general"]["run"] = "left"
    config["slurm"] = {"nodes": 2, "ranks_per_node": 1, "gpu_request": "none", "env": {"CUDA_VISIBLE_DEVICES": ""}}
    config["recovery"] = {"beat_interval_s": 0.5, "supervisor_lost_s": LOST_S}
    config["launcher"] = {"kind": "local", "threads_per_rank": 1}
    path = tmp_path / "left.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "orchestrator", "submit", str(path), "--runs-root", str(tmp_path / "runs")]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "PAWL_"))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    paths = RunPaths(tmp_path / "runs" / "left")
    nonce = next(event.data["nonce"] for event in read_all(paths.root) if event.kind == "attempt_intent")
    yield paths, nonce
    proc.kill_all(lambda: proc.find(nonce=nonce))
    for left in Path("/dev/shm").glob(f"pawl-*-{nonce}-*"):
        left.unlink()


def wait(happened, what: str, *, limit_s: float = 90):
    deadline = time.monotonic() + limit_s
    while not (found := happened()):
        assert time.monotonic() < deadline, f"{what} did not happen in {limit_s} s"
        time.sleep(0.05)
    return found


def test_ranks_without_supervisor_and_agents_end_themselves(run) -> None:
    paths, nonce = run
    log = paths.train_log(1, 1)
    wait(lambda: log.exists() and len(log.read_text().splitlines()) >= 3, "training")
    claim = parse_claim(paths.claim(1).read_text())
    assert isinstance(claim, Claim)
    agents = [node.agent_pid for node in parse_attempt_nodes(paths.nodes(1).read_text()).nodes]
    assert len(agents) == 2 and list(Path("/dev/shm").glob(f"pawl-*-{nonce}-*"))
    for pid in (claim.pid, *agents):
        os.kill(pid, signal.SIGKILL)
    wait(lambda: proc.find(nonce=nonce) == (), "the end of all ranks")
    assert not list(Path("/dev/shm").glob(f"pawl-*-{nonce}-*"))
    logs = "".join(path.read_text() for path in paths.logs(1, 1).glob("*.log"))
    assert "The agent of this node is gone" in logs and f"free for {LOST_S:g} s" in logs
    said = [parse_outcome(path.read_text()) for path in paths.outcomes(1, 1).glob("*.json")]
    assert any(outcome.kind is OutcomeKind.HANG and outcome.exit_code == 90 for outcome in said)
    assert all(json.loads(line)["step"] for line in log.read_text().splitlines()[:-1])
