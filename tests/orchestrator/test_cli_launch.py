"""render and submit as commands, with a stub sbatch and a local launcher that starts nothing.

Cases: S1 S13 S17 (script and reply) · S8 F8 (sizes) · X2 X6 (hostile values, secrets) · bad input of every kind.
"""

import json
import os
import socket
from pathlib import Path

import pytest
import slurm_stubs as stubs
from submit_world import CONFIG, Started, kinds

from orchestrator.cli.app import run
from orchestrator.state.ledger import read_all
from orchestrator.state.rundir import RunPaths


def test_submit_hands_the_script_to_sbatch_and_remembers_the_job(
    config: Path, sbatch: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """S1 (Megatron-Bridge#3068); S17 (srunx#229)."""
    monkeypatch.setenv("SBATCH_JOB_NAME", "theirs")
    assert run(["submit", str(config), "--runs-root", "runs"]) == 0
    paths = RunPaths(Path.cwd() / "runs" / "demo")
    seen = stubs.saw(sbatch, "sbatch")
    assert seen["argv"] == ["--parsable", str(paths.job_script(1))]
    assert seen["environ"] == {}
    found = seen["directives"]
    assert isinstance(found, list)
    assert {"--job-name=demo", "--nodes=3", "--partition=gpu", f"--chdir={os.getcwd()}"} <= set(found)
    nonce = json.loads(paths.intent(1).read_text())["nonce"]
    assert f"--comment=pawl {nonce}" in found
    assert kinds(paths.root) == ["run_created", "decision", "attempt_intent", "attempt_submitted"]
    assert read_all(paths.root)[-1].data["job_id"] == "4711;cluster"
    assert json.loads((paths.attempt(1) / "plan.json").read_text())["nonce"] == nonce
    assert "pawl watch demo" in capsys.readouterr().out


def test_submit_without_slurm_says_so_and_names_the_local_launcher(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(["submit", str(config), "--runs-root", "runs"]) == 4
    assert "--launcher local" in capsys.readouterr().err
    assert os.listdir() == []


def test_submit_local_starts_the_supervisor_with_secrets_in_its_environment_only(
    config: Path, started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    """X6 (labs-molt#128)."""
    assert run(["submit", str(config), "--launcher", "local", "--runs-root", "runs"]) == 0
    ((plan, env),) = started
    assert env == {"HF_TOKEN": "hunter2"}
    assert (plan["launcher"], plan["num_nodes"], plan["num_spares"], plan["world_size"]) == ("local", 2, 1, 4)
    assert plan["workdir"] == os.getcwd()
    said = capsys.readouterr()
    files = [path for path in (Path.cwd() / "runs").rglob("*") if path.is_file() and "hunter2" in path.read_text()]
    assert [(path.name, path.stat().st_mode & 0o777) for path in files] == [("env", 0o600)]
    assert "hunter2" not in said.out + said.err


@pytest.mark.parametrize(
    "command", [["check"], ["check", "--show"], ["check", "--json"], ["render"], ["render", "--plain"]]
)
def test_nothing_printed_holds_a_secret(command: list[str], config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """X6 (labs-molt#128)."""
    assert run([*command, str(config), "--set", "slurm.env.WANDB_API_KEY=hunter3"]) == 0
    said = capfd.readouterr()
    assert "hunter" not in said.out + said.err and len(said.out) > 200


@pytest.mark.parametrize(
    "env",
    [
        "{HF_TOKEN: [hunter2]}",
        "{HF_TOKEN: {a: hunter2}}",
        '"HF_TOKEN=hunter2"',
        "[HF_TOKEN=hunter2]",
        '{HF_TOKEN: "hunter2\\n"}',
    ],
)
@pytest.mark.parametrize("command", [["check", "--show"], ["check", "--json"], ["submit"]])
def test_not_even_a_mistake_shows_a_secret(
    env: str, command: list[str], config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """X6 (labs-molt#128)."""
    config.write_text(config.read_text().replace('{FOO: "a b", HF_TOKEN: hunter2}', env))
    assert run([*command, str(config)]) == 2
    said = capfd.readouterr()
    assert "hunter" not in said.out + said.err and "slurm.env" in said.out + said.err


def test_dry_run_writes_nothing_and_shows_the_script(
    config: Path, sbatch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["submit", str(config), "--dry-run", "--runs-root", "runs"]) == 0
    out = capsys.readouterr().out
    assert "#SBATCH --nodes=3" in out and "hunter2" not in out and "secrets/env" in out
    assert os.listdir() == [] and not (sbatch / "sbatch.json").exists()


def test_a_hostile_job_name_and_runs_root_stay_one_name(config: Path, sbatch: Path) -> None:
    """S3 (submitit#1678); X2 (luigi#3455)."""
    name = "a\"b it's $(touch PWNED) `id`;x"
    config.write_text(config.read_text().replace("partition: gpu", "job_name: " + json.dumps(name)))
    assert run(["submit", str(config), "--runs-root", "run's $(touch PWNED)"]) == 0
    found = stubs.saw(sbatch, "sbatch")["directives"]
    assert isinstance(found, list) and f"--job-name={name}" in found
    assert os.listdir() == ["run's $(touch PWNED)"]


@pytest.mark.parametrize("name", ["a\\nb", "../up", ".x", "a/b", "$(id)"])
def test_a_run_name_that_is_no_folder_is_refused_by_key(
    name: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """X2 (luigi#3455)."""
    config.write_text(config.read_text().replace("run: demo", f'run: "{name}"'))
    assert run(["submit", str(config), "--launcher", "local", "--runs-root", "runs"]) == 2
    assert "general.run" in capsys.readouterr().err
    assert os.listdir() == []


def test_five_mistakes_are_five_messages_before_anything_is_written(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = config.read_text()
    wrong = (
        ("hidden_size: 32", "hidden_size: big"), ("weight_decay", "weight_dekay"), ("spares: 1", "spares: -1"),
        ("learning_rate: 1e-3", "learning_rate: -1"), ("gpu_request: none", "gpu_request: some"),
    )  # fmt: skip
    for old, new in wrong:
        text = text.replace(old, new)
    config.write_text(text)
    assert run(["submit", str(config), "--launcher", "local", "--runs-root", "runs"]) == 2
    error = capsys.readouterr().err
    for key in ("hidden_size", "weight_dekay", "recovery.spares", "learning_rate", "gpu_request"):
        assert sum(key in line and f"{config.name}:" in line for line in error.splitlines()) == 1, key
    assert os.listdir() == []


@pytest.mark.parametrize("launcher", ["local", "slurm"])
def test_a_wrong_world_size_is_refused_with_all_numbers(
    launcher: str, config: Path, sbatch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """S8 (pytorch-lightning#20391), F8: before sbatch is called and before anything is written."""
    arguments = ["submit", str(config), "--launcher", launcher, "--runs-root", "runs"]
    assert run([*arguments, "--set", "parallelism.dp=8"]) == 2
    error = capsys.readouterr().err
    assert all(number in error for number in ("nodes 2", "ranks_per_node 2", "= 4 ranks", "dp 8", "pp 2", "= 16"))
    assert os.listdir() == [] and not (sbatch / "sbatch.json").exists()


STAGES = "data_stages: [{name: a, start_training_step: 10, data: {dataset: {dataset_folder: [d]}}}]"


@pytest.mark.parametrize(
    ("data", "line", "words"),
    [
        (b"#!/bin/bash\n#SBATCH --nodes=2\nsrun x\n", 1, "script"),
        (b"", 1, "empty"),
        (b"general:\n\trun: x\n", 2, "tab"),
        (b"\x7fELF\x02\x01\x00", 1, "binary"),
        (CONFIG.replace("data: {dataset: {dataset_folder: [DATA]}}", STAGES).encode(), 10, "no stage starts at step 1"),
    ],
    ids=["script", "empty", "tab", "binary", "stages-from-10"],
)
@pytest.mark.parametrize("command", [["check"], ["submit", "--launcher", "local", "--runs-root", "runs"]])
def test_a_wrong_file_is_one_line_with_its_place_and_exit_2(
    command: list[str], data: bytes, line: int, words: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """F4 (nanotron#166, #121): no traceback and no assertion, whichever command is given the file."""
    config.write_bytes(data)
    assert run([command[0], str(config), *command[1:]]) == 2
    said = capsys.readouterr()
    lines = [text for text in (said.out + said.err).splitlines() if ": error: " in text]
    assert len(lines) == 1 and f"{config}:{line}: error: " in lines[0] and words in lines[0], said
    assert "Traceback" not in said.out + said.err and os.listdir() == []


def test_an_existing_name_asks_for_resume_or_another_name(
    config: Path, started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["submit", str(config), "--launcher", "local", "--runs-root", "runs"]
    assert run(arguments) == 0
    before = kinds(Path.cwd() / "runs" / "demo")
    assert run(arguments) == 2
    assert "pawl resume demo" in capsys.readouterr().err
    assert kinds(Path.cwd() / "runs" / "demo") == before and len(started) == 1


def test_a_port_in_use_is_one_error_and_nothing_is_made(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        arguments = ["submit", str(config), "--launcher", "local", "--runs-root", "runs"]
        assert run([*arguments, "--set", f"monitoring.agent_port={port}"]) == 1
    assert str(port) in capsys.readouterr().err
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("change", "key"),
    [("slurm.extra=[--requeue]", "slurm.extra"), ("slurm.prologue='#SBATCH --qos=x'", "slurm.prologue")],
)
def test_what_cannot_be_launched_is_refused_before_anything_is_written(
    change: str, key: str, config: Path, sbatch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["submit", str(config), "--runs-root", "runs", "--set", change]) == 2
    assert key in capsys.readouterr().err
    assert os.listdir() == []


def test_an_unknown_launcher_is_named(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["submit", str(config), "--launcher", "k8s"]) == 2
    assert "slurm, local" in capsys.readouterr().err


def test_slurms_refusal_keeps_the_run_and_says_how_to_go_on(
    config: Path, sbatch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (sbatch / "bin" / "sbatch").write_text(
        "#!/bin/sh\necho 'sbatch: error: invalid partition specified: gpu' >&2\nexit 1\n"
    )
    assert run(["submit", str(config), "--runs-root", "runs"]) == 1
    error = capsys.readouterr().err
    assert "invalid partition specified: gpu" in error and "pawl resume demo" in error
    assert "attempt_ended" in kinds(Path.cwd() / "runs" / "demo")
