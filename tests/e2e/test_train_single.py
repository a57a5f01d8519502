"""One rank, as a process: trained, killed, resumed, drained, damaged. Loss is compared bit for bit with a quiet run.

Processes are real and so are their deaths; only the model is tiny.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_run

from trainer.beat import CONTROL_AT, HEADER, HEADER_BYTES, MAGIC, RANK_STRIDE, Phase

STEPS, INTERVAL, MEASURED = 30, 3, 9
PLAIN = Path("attempts/0000/cycles/0000")


def environment(**changes: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "PAWL_", "TORCHELASTIC"))}
    return {**kept, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1", **changes}


def start(config: Path, run_dir: Path, *more: str, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trainer", "train", "--config-file", str(config), "--run-dir", str(run_dir), *more]
    return subprocess.Popen(
        command, env=environment(**env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def train(config: Path, run_dir: Path, *more: str, **env: str) -> tuple[int, str]:
    return finish(start(config, run_dir, *more, **env))


def wait_for(process: subprocess.Popen[str], happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert process.poll() is None, f"ended too early: {process.communicate()[0]}"
        assert time.monotonic() < deadline, "did not happen in a minute"
        time.sleep(0.002)


def committed(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))


def numbers(*cycles: Path) -> dict[int, tuple[str, str, float, int, int]]:
    """Per step (a later line wins): loss and grad-norm bit for bit, lr, samples, tokens."""
    lines = [line for cycle in cycles for line in (cycle / "train.jsonl").read_text().splitlines(keepends=True)]
    read: list[dict[str, Any]] = [json.loads(line) for line in lines if line.endswith("\n")]
    return {
        line["step"]: (
            line["loss"].hex(),
            line["grad_norm"].hex(),
            line["lr"],
            line["consumed_samples"],
            line["tokens"],
        )
        for line in read
    }


def held_out(cycle: Path) -> dict[int, str]:
    """The held-out loss at each step it was measured at."""
    lines = map(json.loads, (cycle / "validation.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"].hex() for line in lines}


def outcome(cycle: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((cycle / "outcomes" / "rank-00000.json").read_text())
    return body


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("single")


@pytest.fixture(scope="module")
def config(root: Path) -> Path:
    return tiny_run.make(root, train_steps=STEPS, interval=INTERVAL, val_check_interval=MEASURED, accumulation=6)


@pytest.fixture(scope="module")
def alone(root: Path, config: Path) -> Path:
    """A run that nobody disturbs."""
    code, output = train(config, root / "alone")
    assert code == 0, output
    return root / "alone"


def test_a_first_run_starts_fresh_trains_saves_and_validates(alone: Path) -> None:
    """R4. Lightning#20347: there is nothing to resume from, and that is no error."""
    assert sorted(numbers(alone / PLAIN)) == list(range(1, STEPS + 1))
    assert committed(alone) == [f"step-{step:09d}.a0000g00c0000" for step in range(INTERVAL, STEPS + 1, INTERVAL)]
    lines = [json.loads(line) for line in (alone / PLAIN / "validation.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(MEASURED, STEPS, MEASURED), STEPS]
    assert {line["num_valid"] for line in lines} == {5 * tiny_run.SEQUENCE}
    assert (outcome(alone / PLAIN)["kind"], outcome(alone / PLAIN)["exit_code"]) == ("done", 0)


def test_killed_and_resumed_it_is_the_run_it_would_have_been(root: Path, config: Path, alone: Path) -> None:
    run_dir = root / "killed"
    process = start(config, run_dir)
    wait_for(process, lambda: len(committed(run_dir)) >= 2)
    process.send_signal(signal.SIGKILL)
    code, output = finish(process)
    assert code == -signal.SIGKILL, output
    assert not (run_dir / PLAIN / "outcomes").exists(), "a rank that dies hard leaves no outcome"
    code, output = train(config, run_dir)
    assert code == 0, output
    assert "goes on from step-" in output
    assert numbers(run_dir / PLAIN) == numbers(alone / PLAIN)
    assert held_out(run_dir / PLAIN) == held_out(alone / PLAIN)
    last = committed(run_dir)[-1]
    for file in ("rank-00000.safetensors", "index.json"):
        ours, theirs = (folder / "checkpoints" / last / file for folder in (run_dir, alone))
        assert ours.read_bytes() == theirs.read_bytes()


def test_sigterm_drains_at_the_border_and_the_run_goes_on(root: Path, config: Path, alone: Path) -> None:
    run_dir = root / "drained"
    process = start(config, run_dir)
    wait_for(process, lambda: len(committed(run_dir)) >= 1)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 75, output
    left = outcome(run_dir / PLAIN)
    assert (left["kind"], left["checkpoint"]) == ("drained", committed(run_dir)[-1])
    assert 0 < left["step"] < STEPS
    assert train(config, run_dir)[0] == 0
    assert numbers(run_dir / PLAIN) == numbers(alone / PLAIN)


def test_a_complete_run_is_left_alone(config: Path, alone: Path) -> None:
    """R5. Megatron-LM#1310: at the last step there is nothing to train, to save or to validate."""
    before = {path: path.stat().st_mtime_ns for path in (alone / "checkpoints").rglob("*")}
    lines = (alone / PLAIN / "validation.jsonl").read_text()
    code, output = train(config, alone)
    assert code == 0, output
    assert "Already complete" in outcome(alone / PLAIN)["message"]
    assert {path: path.stat().st_mtime_ns for path in (alone / "checkpoints").rglob("*")} == before
    assert (alone / PLAIN / "validation.jsonl").read_text() == lines


def test_a_damaged_newest_checkpoint_is_set_aside_and_the_one_before_is_used(root: Path, alone: Path) -> None:
    """metaseq#53 and a save cut short by a kill: neither is loaded, and neither blocks the next save of its name.

    Cases R1 (torchtitan#315, #4191); R2.
    """
    run_dir = root / "damaged"
    short = tiny_run.make(root, "short", train_steps=2 * INTERVAL, interval=INTERVAL)
    assert train(short, run_dir)[0] == 0
    newest = run_dir / "checkpoints" / committed(run_dir)[-1]
    (newest / "rank-00000.safetensors").write_bytes((newest / "rank-00000.safetensors").read_bytes()[:-7])
    (run_dir / "checkpoints" / f".{newest.name}.partial").mkdir()
    code, output = train(short, run_dir)
    assert code == 0, output
    assert "rank-00000.safetensors" in output, "the bad file is named"
    assert f"goes on from step-{INTERVAL:09d}" in output
    assert len(list((run_dir / "checkpoints").glob(".quarantine-*"))) == 2
    assert committed(run_dir) == [f"step-{step:09d}.a0000g00c0000" for step in (INTERVAL, 2 * INTERVAL)]


def test_a_wrong_world_size_ends_in_seconds_with_all_numbers(root: Path) -> None:
    """S8. Lightning#20391: a trainer that believed in two ranks waited for ever for the one that was never started."""
    config = tiny_run.make(root, "four-ranks", dp=2, pp=2)
    began = time.monotonic()
    code, output = train(config, root / "wrong", WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    assert code == 78, output
    assert time.monotonic() - began < 30
    message = outcome(root / "wrong" / PLAIN)["message"]
    assert "3 ranks" in message
    assert "dp · pp · cp · tp = 2 · 2 · 1 · 1 = 4" in message


class Supervised:
    """What an agent prepares: a cycle file and a node's shared memory."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.shm = run_dir / "shm"
        run_dir.mkdir(parents=True)
        header = HEADER.pack(MAGIC, 1, 1, RANK_STRIDE, HEADER_BYTES)
        self.shm.write_bytes(header.ljust(HEADER_BYTES + RANK_STRIDE, b"\0"))

    def cycle(self, number: int, *, resume_from: str | None, **changes: Any) -> Path:
        folder = self.run_dir / "attempts" / "0001" / "cycles" / f"{number:04d}"
        folder.mkdir(parents=True)
        body = {
            "schema_version": 1,
            "run": "tiny",
            "epoch": {"attempt": 1, "generation": 1, "cycle": number},
            "nonce": "n",
            "resume_from": resume_from,
            "skip_windows": [],
            "nodes": [{"node_rank": 0, "name": "node0", "address": "127.0.0.1"}],
            "ranks_per_node": 1,
            "world_size": 1,
            "master_addr": "127.0.0.1",
            "master_port": 1,
            "config": "run.yaml",
            "beat_interval_s": 1.0,
            "created_unix": 1.0,
            **changes,
        }
        (folder / "cycle.json").write_text(json.dumps(body))
        return folder

    def arguments(self, folder: Path) -> tuple[str, ...]:
        return ("--cycle", str(folder / "cycle.json"), "--shm", str(self.shm))

    def u(self, at: int, size: int) -> int:
        return int.from_bytes(self.shm.read_bytes()[at : at + size], "little")

    @property
    def phase(self) -> int:
        return self.u(HEADER_BYTES + 28, 4)

    def say(self, *, seq: int, word: int) -> None:
        with self.shm.open("r+b") as file:
            file.seek(CONTROL_AT)
            file.write(seq.to_bytes(8, "little") + word.to_bytes(4, "little"))


def test_under_an_agent_drain_by_word_and_resume_exactly_where_told(root: Path, config: Path, alone: Path) -> None:
    agent = Supervised(root / "supervised")
    first = agent.cycle(1, resume_from=None)
    process = start(config, agent.run_dir, *agent.arguments(first))
    wait_for(process, lambda: agent.u(HEADER_BYTES + 32, 8) >= 2)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGUSR2)
    agent.say(seq=1, word=2)
    code, output = finish(process)
    assert code == 75, output
    assert agent.phase == Phase.EXIT
    assert agent.u(HEADER_BYTES + 64, 8) == 1, "control_ack"
    assert "most recent call first" in (first / "evidence" / "rank-00000.stacks").read_text()
    names = committed(agent.run_dir)
    assert names[-1].endswith(".a0001g01c0001")
    agent.say(seq=0, word=0)
    second = agent.cycle(2, resume_from=names[0])
    code, output = train(config, agent.run_dir, *agent.arguments(second))
    assert code == 0, output
    assert numbers(first, second) == numbers(alone / PLAIN)
    assert min(numbers(second)) == INTERVAL + 1, "exactly resume_from, not the newest"
    assert outcome(second)["epoch"] == {"attempt": 1, "generation": 1, "cycle": 2}


def test_under_an_agent_a_bad_checkpoint_is_named_and_nothing_else_is_tried(root: Path, config: Path) -> None:
    """R2 (Lightning#688, metaseq#53)."""
    agent = Supervised(root / "bad")
    short = tiny_run.make(root, "short", train_steps=2 * INTERVAL, interval=INTERVAL)
    assert train(short, agent.run_dir, *agent.arguments(agent.cycle(1, resume_from=None)))[0] == 0
    newest = agent.run_dir / "checkpoints" / committed(agent.run_dir)[-1]
    tensors = bytearray((newest / "rank-00000.safetensors").read_bytes())
    tensors[len(tensors) // 2] ^= 1
    (newest / "rank-00000.safetensors").write_bytes(bytes(tensors))
    second = agent.cycle(2, resume_from=newest.name)
    assert train(short, agent.run_dir, *agent.arguments(second))[0] == 89
    left = outcome(second)
    assert (left["kind"], left["phase"]) == ("checkpoint_invalid", "RESTORE")
    assert left["bad_file"] == f"checkpoints/{newest.name}/rank-00000.safetensors"
    assert not (second / "train.jsonl").exists()
    third = agent.cycle(3, resume_from="step-000000099.a0001g01c0001")
    assert train(short, agent.run_dir, *agent.arguments(third))[0] == 89


def test_under_an_agent_the_cycles_world_size_counts_too(root: Path, config: Path) -> None:
    agent = Supervised(root / "cycle-size")
    folder = agent.cycle(1, resume_from=None, world_size=4, ranks_per_node=2, nodes=[{}, {}])
    code, output = train(config, agent.run_dir, *agent.arguments(folder))
    assert code == 78, output
    assert "4 ranks (2 nodes × 2 ranks per node), torchrun started 1" in outcome(folder)["message"]


def test_a_config_that_does_not_hold_is_said_and_not_retried(root: Path) -> None:
    broken = root / "broken.yaml"
    broken.write_text(tiny_run.make(root, "whole").read_text().replace("hidden_size: 32", "hidden_size: 33"))
    code, output = train(broken, root / "broken")
    assert code == 78, output
    assert outcome(root / "broken" / PLAIN)["kind"] == "config_error"
