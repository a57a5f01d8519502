"""Two ranks under torchrun: a rank is killed, one rank is asked to drain, and another mesh goes on.

The runs of one mesh are compared bit for bit with a run left alone, those of two meshes to rounding.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny_run

STEPS, INTERVAL = 24, 3
PLAIN = Path("attempts/0000/cycles/0000")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start(config: Path, run_dir: Path) -> subprocess.Popen[str]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--node-rank=0", "--nproc-per-node=2"),
        *("--master-addr=127.0.0.1", f"--master-port={free_port()}", "--max-restarts=0"),
        *("-m", "trainer", "train", "--config-file", str(config), "--run-dir", str(run_dir)),
    ]
    env = {key: value for key, value in os.environ.items() if not key.startswith(("TORCHELASTIC", "SLURM_", "PAWL_"))}
    return subprocess.Popen(
        command, env={**env, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def train(config: Path, run_dir: Path) -> str:
    code, output = finish(start(config, run_dir))
    assert code == 0, output
    return output


def rank_process(process: subprocess.Popen[str], rank: int) -> psutil.Process:
    workers = psutil.Process(process.pid).children()
    return next(worker for worker in workers if worker.environ().get("RANK") == str(rank))


def wait_for(process: subprocess.Popen[str], happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not happened():
        assert process.poll() is None, f"ended too early: {process.communicate()[0]}"
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)


def committed(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))


def lines(run_dir: Path) -> dict[int, dict[str, Any]]:
    text = (run_dir / PLAIN / "train.jsonl").read_text()
    return {line["step"]: line for line in map(json.loads, text.splitlines())}


def bits(run_dir: Path) -> dict[int, tuple[str, str]]:
    return {step: (line["loss"].hex(), line["grad_norm"].hex()) for step, line in lines(run_dir).items()}


def outcomes(run_dir: Path) -> list[tuple[int, str, int]]:
    read = [json.loads(path.read_text()) for path in sorted((run_dir / PLAIN / "outcomes").glob("rank-*.json"))]
    return [(body["rank"], body["kind"], body["exit_code"]) for body in read]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("torchrun")


@pytest.fixture(scope="module")
def config(root: Path) -> Path:
    return tiny_run.make(root, "dp2", dp=2, train_steps=STEPS, interval=INTERVAL)


@pytest.fixture(scope="module")
def alone(root: Path, config: Path) -> Path:
    train(config, root / "alone")
    return root / "alone"


def test_two_replicas_train_to_the_end(alone: Path) -> None:
    assert sorted(lines(alone)) == list(range(1, STEPS + 1))
    assert outcomes(alone) == [(0, "done", 0), (1, "done", 0)]


def test_a_killed_rank_ends_the_launch_and_the_next_one_goes_on_bit_for_bit(
    root: Path, config: Path, alone: Path
) -> None:
    """H7 (pytorch/elastic#134, pytorch#97191)."""
    run_dir = root / "killed"
    process = start(config, run_dir)
    wait_for(process, lambda: len(committed(run_dir)) >= 2)
    rank_process(process, 1).send_signal(signal.SIGKILL)
    code, output = finish(process)
    assert code != 0, output
    assert (1, "done", 0) not in outcomes(run_dir)
    assert "goes on from step-" in train(config, run_dir)
    assert bits(run_dir) == bits(alone)


def test_one_rank_that_is_asked_to_drain_is_enough(root: Path, config: Path, alone: Path) -> None:
    run_dir = root / "drained"
    process = start(config, run_dir)
    wait_for(process, lambda: len(committed(run_dir)) >= 1)
    rank_process(process, 1).send_signal(signal.SIGUSR2)
    code, output = finish(process)
    assert code != 0, output
    assert outcomes(run_dir) == [(0, "drained", 75), (1, "drained", 75)], "every rank says how it ended"
    assert len(lines(run_dir)) < STEPS
    train(config, run_dir)
    assert bits(run_dir) == bits(alone)


def test_two_stages_go_on_where_two_replicas_stopped(root: Path, config: Path, alone: Path) -> None:
    run_dir = root / "other-mesh"
    half = tiny_run.make(root, "half", dp=2, train_steps=STEPS // 2, interval=INTERVAL)
    half.write_text(half.read_text().replace("lr_warmup_steps", f"lr_decay_steps: {STEPS - 2}\n    lr_warmup_steps"))
    train(half, run_dir)
    pipeline = tiny_run.make(root, "pp2", pp=2, train_steps=STEPS, interval=INTERVAL, accumulation=4)
    train(pipeline, run_dir)
    assert sorted(lines(run_dir)) == list(range(1, STEPS + 1))
    for step, line in lines(run_dir).items():
        assert line["loss"] == pytest.approx(lines(alone)[step]["loss"], rel=2e-5)
        assert line["consumed_samples"] == lines(alone)[step]["consumed_samples"]
