"""ops/gpu_check.sh where there is no GPU says so at once; what it measures holds on a CPU too, but for memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ops import gpu_check

ROOT = Path(__file__).parents[2]


def test_without_a_gpu_it_says_so_and_stops(tmp_path: Path) -> None:
    for tool in ("dirname", "bash", "env"):
        (tmp_path / tool).symlink_to(
            next(path for path in (Path("/usr/bin") / tool, Path("/bin") / tool) if path.exists())
        )
    done = subprocess.run(
        ["bash", str(ROOT / "ops" / "gpu_check.sh")], env={"PATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "no NVIDIA GPU to check" in done.stderr


def test_a_torch_that_sees_no_gpu_is_named_before_anything_trains_on_the_cpu(tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nexit 0\n")
    smi.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", str(ROOT / "ops" / "gpu_check.sh")],
        env={**env, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == ""
    assert "torch finds no GPU" in done.stderr and "CUDA_VISIBLE_DEVICES=)" in done.stderr


@pytest.mark.parametrize("config", sorted(path.name for path in (ROOT / "configs").glob("*.yaml")))
def test_any_config_becomes_a_run_of_one_rank(config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "write_tokens", lambda folder, *, vocab: folder)
    facts, file = gpu_check.derive(f"{ROOT}/configs/{config}", tmp_path, steps=20, changes=[])
    assert facts["world_size"] == 1
    made = yaml.safe_load(file.read_text())
    assert made["data"] == {"dataset": {"dataset_folder": [str(tmp_path / "tokens")]}}
    assert (made["tokens"]["train_steps"], made["checkpoints"]["checkpoint_interval"]) == (20, 10)


def test_on_a_cpu_everything_holds_but_the_memory_of_an_accelerator(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ops.gpu_check", "configs/tiny.yaml", "--steps", "6", "--keep", str(tmp_path)]
    command += ["--variants", "zb-v"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    table = [line.split(maxsplit=2) for line in done.stdout.splitlines() if line.startswith(("ok  ", "WRONG"))]
    assert [(mark, what) for mark, what, _ in table] == [
        ("ok", "check"),
        ("ok", "train"),
        ("WRONG", "memory"),
        ("ok", "resume"),
        ("ok", "zb-v"),
        ("ok", "profile"),
    ], done.stdout + done.stderr
    assert "3 of 3 losses bit-equal" in done.stdout and "6 of 6 losses bit-equal" in done.stdout
    assert done.returncode == 1
