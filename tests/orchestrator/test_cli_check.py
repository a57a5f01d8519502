"""`pawl check` and what a plain render refuses, as commands."""

import json
from pathlib import Path

import pytest
from submit_world import CONFIG

from orchestrator.cli.app import run


def test_check_lists_what_it_could_not_see_and_here_demands_it(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(config.read_text().replace("dataset_folder: [", "dataset_folder: [/no/such/folder, "))
    assert run(["check", str(config)]) == 0
    out = capsys.readouterr().out
    assert "Not checked on this machine" in out and "/no/such/folder" in out and out.endswith("ok\n")
    assert "memory of the fullest rank" in out and "2 nodes × 2 ranks + 1 hot spare" in out
    assert run(["check", str(config), "--here"]) == 2


def test_check_as_json_is_one_document(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(config), "--json", "--set", "tokens.train_steps=7"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] and data["facts"]["train_steps"] == 7
    assert data["launch"] == {"nodes": 2, "spares": 1, "ranks_per_node": 2, "launcher": "slurm", "executed": []}
    assert data["origins"]["tokens.train_steps"].startswith("--set")


def test_check_show_names_the_origin_of_every_value(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(config), "--show", "--set", "recovery.beat_interval_s=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = CONFIG.split("\n").index("  partition: gpu") + 1
    assert f'slurm.partition = "gpu"    [{config}:{at}]' in lines
    assert "slurm.qos = null    [default]" in lines
    assert any(line.startswith("recovery.beat_interval_s = 2") and "[--set" in line for line in lines)


def test_check_show_ends_in_what_changes_over_the_run(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ("tokens.train_steps=8", "optimizer.weight_decay=0.5", "optimizer.weight_decay_schedule={end_value: 1}")
    assert run(["check", str(config), "--show", *(word for text in changes for word in ("--set", text))]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    at = lines.index(["step", "learning", "rate", "weight", "decay", "samples"])
    first, last = lines[at + 1], next(line for line in lines[at + 1 :] if line[0] == "8")
    assert (first[0], float(first[2]), float(last[2])) == ("1", 0.5625, 1.0) and int(last[3]) > 0


def test_plain_render_refuses_values_that_the_trainer_would_not_see(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["render", str(config), "--plain", "--set", "tokens.train_steps=5"]) == 2
    assert "tokens.train_steps" in capsys.readouterr().err
    assert run(["render", str(config), "--plain", "--set", "slurm.partition=other"]) == 0
    out = capsys.readouterr().out
    assert "--partition=other" in out and str(config) in out.split()
