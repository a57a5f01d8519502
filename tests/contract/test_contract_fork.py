"""`pawl fork` through both packages: the trainer wrote the checkpoint, the command forks it, nothing is started."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import yaml
from checkpoint_folders import start
from checkpoint_world import flip_byte, save_world

from orchestrator.cli.app import run
from orchestrator.control import launch_local
from orchestrator.control.shelf import read_shelf
from orchestrator.state.epochs import Epoch
from orchestrator.state.ledger import read_all
from orchestrator.state.rundir import RunPaths
from orchestrator.submit.facts import read_frozen
from orchestrator.submit.secrets_file import read_secrets
from orchestrator.views.run_view import run_view
from trainer.checkpoint.reader import open_checkpoint
from trainer.config import load_config
from trainer.memory import topology_of
from trainer.spec import param_specs

STEP, NAME, START = 40, "step-000000040.a0001g01c0001", "step-000000040.a0000g00c0000"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, Any]]:
    """Plans that the local launcher was asked to start; nothing is started."""
    calls: list[Mapping[str, Any]] = []
    monkeypatch.setattr(launch_local, "start_attempt", lambda paths, plan, env=None: calls.append(plan) or 4242)
    return calls


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs with the run `test`, at step 40 of 80, submitted in another folder than the tests run in."""
    root = tmp_path_factory.mktemp("fork")
    work = root / "submitted-here"
    work.mkdir()
    path = tiny_run.make(root, "test", dp=2, train_steps=80)
    config = yaml.safe_load(path.read_text())
    config["general"]["run"] = "test"
    config["data"] = {"dataset": {"dataset_folder": ["../data/a"]}}
    config["slurm"] = {"nodes": 1, "ranks_per_node": 2, "gpu_request": "none", "env": {"HF_TOKEN": "hunter2"}}
    config["launcher"] = {"kind": "local"}
    path.write_text(yaml.safe_dump(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAWL_RUNS", str(root / "runs"))
        patch.chdir(work)
        patch.setattr(launch_local, "start_attempt", lambda paths, plan, env=None: 4242)
        assert run(["submit", str(path)]) == 0
    paths = RunPaths(root / "runs" / "test")
    start(paths, Epoch(1, 1, 1), None)
    read = load_config(paths.config)
    save_world(paths.checkpoints, param_specs(read, topology_of(read)), topology_of(read), step=STEP)
    return root


@pytest.fixture
def source(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """A copy of that run for one test, beside nothing else."""
    monkeypatch.setenv("PAWL_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made / "runs" / "test", tmp_path / "runs" / "test")
    return RunPaths(tmp_path / "runs" / "test")


def event(paths: RunPaths, kind: str) -> dict[str, Any]:
    return next(event.data for event in read_all(paths.root) if event.kind == kind)


def new_run(source: RunPaths, name: str) -> RunPaths:
    return RunPaths(source.root.parent / name)


def test_a_whole_fork_goes_on_at_its_step_with_what_was_changed(
    made: Path, source: RunPaths, started: list[Mapping[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ["general.seed=9", "tokens.batch_accumulation_per_replica=4"]
    sets = [word for change in changes for word in ("--set", change)]
    assert run(["fork", f"test@{STEP}", "--run", "new", "--why", "another order", *sets]) == 0
    new = new_run(source, "new")
    assert "4 files linked, 0 copied" in capsys.readouterr().out
    config = load_config(new.config)
    assert (config.general.run, config.general.seed, config.global_batch_size) == ("new", 9, 16)
    assert new.config.read_text().startswith(f"# forked from test@{NAME} (")
    told = event(new, "forked")
    assert (told["run"], told["step"], told["checkpoint"], told["weights_only"]) == ("test", STEP, NAME, False)
    assert told["set"] == changes and told["why"] == "another order"
    assert told["digest"] == json.loads((source.checkpoint(NAME) / "manifest.json").read_text())["xxh3"]
    counting = read_shelf(new).counting
    assert counting.newest is not None and counting.newest.name == START
    assert read_secrets(new.root) == {"HF_TOKEN": "hunter2"} and "hunter2" not in new.config.read_text()
    assert [plan["workdir"] for plan in started] == [str(made / "submitted-here")]
    view = run_view(new.root)
    assert view.lineage is not None and view.lineage.text == f"test@{STEP} ({NAME})"
    assert run(["explain", "new"]) == 0 and f"forked from test@{STEP}" in capsys.readouterr().out
    shutil.rmtree(source.root)
    assert run(["ckpt", "verify", "new"]) == 0


def test_weights_only_starts_at_nothing_from_its_own_copy(
    source: RunPaths, started: list[Mapping[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["fork", "test", "--run", "new", "--weights-only", "--no-start"]) == 0
    assert "pawl resume new" in capsys.readouterr().out and not started
    new = new_run(source, "new")
    base = new.root / "base" / NAME
    config = load_config(new.config)
    assert config.model.init_method.path == str(base)
    assert open_checkpoint(base).manifest.run == "test"
    assert read_shelf(new).items == () and read_frozen(new).facts.run == "new"
    assert run(["status", "new"]) == 3
    assert run(["resume", "new"]) == 0
    assert len(started) == 1 and "goes on from the beginning" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--run", "test"], 2, "The run 'test' exists already"),
        (["--run", "new", "--set", "general.run=x"], 2, "given by --run"),
        (["--run", "new", "--set", "tokens.train_steps=40"], 2, "--set tokens.train_steps=80"),
        (["--run", "new", "--set", "model.model_config.hidden_size=64"], 2, "tensors differ"),
        (["--run", "new", "--set", "tokens.train_step=90"], 2, "train_steps"),
        (["--run", "../new"], 2, "cannot name a run directory"),
        (["--run", "new", "--watch", "--no-start"], 2, "exclude each other"),
    ],
)
def test_what_cannot_be_forked_is_said_and_leaves_nothing(
    words: list[str], code: int, says: str, source: RunPaths, started: list[Mapping[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert run(["fork", "test", *words]) == code
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error
    assert os.listdir(source.root.parent) == ["test"] and not started


def test_a_damaged_checkpoint_is_not_taken_over(source: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    bad = source.checkpoint(NAME) / "rank-00001.safetensors"
    flip_byte(bad, bad.stat().st_size - 5)
    assert run(["fork", "test", "--run", "new"]) == 1
    assert str(bad) in capsys.readouterr().err and os.listdir(source.root.parent) == ["test"]
    assert run(["ckpt", "verify", "test"]) == 1
    assert f"{NAME} is damaged" in capsys.readouterr().err


def test_a_dry_run_makes_nothing(source: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fork", "test", "--run", "new", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert f"step {STEP}, from test@{NAME}" in text and "each need" in text and "quota" in text
    assert os.listdir(source.root.parent) == ["test"]
