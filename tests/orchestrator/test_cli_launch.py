"""check, render, submit, resume, controller as commands, with a stub sbatch and a local launcher that starts nothing.

Cases: S1 S13 S17 (script and reply) · S8 F8 (sizes) · X2 X6 (hostile values, secrets) · bad input of every kind.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import slurm_stubs as stubs
from run_factory import rough

from orchestrator.cli.actions.launch import goes_on_from
from orchestrator.cli.app import run
from orchestrator.config import check
from orchestrator.control import launch_local
from orchestrator.state.ledger import Ledger, read_all
from orchestrator.state.records import Epoch
from orchestrator.state.rundir import RunPaths
from orchestrator.views.run_view import run_view

CONFIG = """\
general: {project: p, run: demo, seed: 1}
parallelism: {dp: 2, pp: 2, tp: 1}
model:
  dtype: float32
  model_config:
    {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
     max_position_embeddings: 64, vocab_size: 300, tie_word_embeddings: true}
optimizer: {learning_rate_scheduler: {learning_rate: 1e-3}, weight_decay: 0.01}
tokens: {sequence_length: 32, train_steps: 20, micro_batch_size: 2, batch_accumulation_per_replica: 2}
data: {dataset: {dataset_folder: [DATA]}}
checkpoints: {checkpoint_interval: 5}
slurm:
  nodes: 2
  ranks_per_node: 2
  partition: gpu
  gpu_request: none
  env: {FOO: "a b", HF_TOKEN: hunter2}
recovery: {spares: 1}
"""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small token folder, made by the public commands."""
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("\n".join(f"the quick brown fox number {i} jumps" for i in range(300)))
    trainer = [sys.executable, "-m", "trainer", "data"]
    train = ["tokenizer", "train", "--input", "text/a.txt", "--vocab-size", "300", "--out", "tokenizer"]
    prepare = ["prepare", "--input", "text", "--tokenizer", "tokenizer", "--out", "data"]
    for words in (train, prepare):
        subprocess.run([*trainer, *words], cwd=folder, check=True, capture_output=True, timeout=120)
    return folder / "data"


@pytest.fixture(scope="module")
def answers() -> dict[tuple[object, ...], dict[str, Any]]:
    """The trainer's answers by question: asking it costs a process, and most tests ask the same."""
    return {}


@pytest.fixture
def config(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: dict[tuple[object, ...], dict[str, Any]]
) -> Path:
    """A config file; the current folder is another one, and empty."""
    path = tokens.parent / "run.yaml"
    path.write_text(CONFIG.replace("DATA", str(tokens)))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    ask = check.ask_trainer

    def ask_once(config: Path, *, overrides: tuple[str, ...], site: Path | None, here: bool) -> dict[str, Any]:
        question = (config.name, config.read_text(), overrides, site, here)
        if question not in answers:
            answers[question] = ask(config, overrides=overrides, site=site, here=here)
        return answers[question]

    monkeypatch.setattr(check, "ask_trainer", ask_once)
    return path


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stub sbatch on PATH; the folder where it notes what it saw."""
    bin_dir = stubs.install(tmp_path / "slurm", reply="Quota 42% used.\n4711;cluster")
    monkeypatch.setenv("PATH", f"{bin_dir}:/usr/bin:/bin")
    return tmp_path / "slurm"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Mapping[str, Any], Mapping[str, str]]]:
    """Plans and environments that the local launcher was asked to start; nothing is started."""
    calls: list[tuple[Mapping[str, Any], Mapping[str, str]]] = []

    def start(paths: RunPaths, plan: Mapping[str, Any], *, env: Mapping[str, str] | None = None) -> int:
        calls.append((plan, env or {}))
        return 4242

    monkeypatch.setattr(launch_local, "start_attempt", start)
    return calls


def kinds(run_dir: Path) -> list[str]:
    return [event.kind for event in read_all(run_dir)]


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
    config: Path, started: list[tuple[Mapping[str, Any], Mapping[str, str]]], capsys: pytest.CaptureFixture[str]
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
    config: Path, started: list[tuple[Mapping[str, Any], Mapping[str, str]]], capsys: pytest.CaptureFixture[str]
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


def drained_run(config: Path) -> RunPaths:
    """A run whose first attempt was abandoned and ended by a drain."""
    assert run(["submit", str(config), "--launcher", "local", "--runs-root", "runs"]) == 0
    paths = RunPaths(Path.cwd() / "runs" / "demo")
    claim = {"schema_version": 1, "nonce": "abandoned", "host": "h", "pid": 1, "start_ticks": 1, "boot_id": "b"}
    paths.claim(1).write_text(json.dumps({**claim, "created_unix": 1.0}))
    Ledger(paths.root, "attempt-0001-g01").append(
        Epoch(1, 1, 1), "attempt_ended", {"outcome": "drained", "reason": "asked", "rule": "drained"}
    )
    return paths


def test_resume_goes_on_after_a_drain(
    config: Path, started: list[tuple[Mapping[str, Any], Mapping[str, str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    paths = drained_run(config)
    assert run(["resume", "demo", "--runs-root", "runs"]) == 0
    out = capsys.readouterr().out
    assert "launched attempt 2" in out and "demo goes on from the beginning." in out
    assert [plan["attempt"] for plan, _ in started] == [1, 2]
    assert kinds(paths.root)[-5:] == ["attempt_ended", "resumed", "decision", "attempt_intent", "attempt_submitted"]


def test_a_resume_names_the_damaged_checkpoints_it_passes_over(tmp_path: Path) -> None:
    run_dir = rough().write(tmp_path)
    newest = run_view(run_dir).checkpoints[0].name
    assert goes_on_from(run_view(run_dir)) == (f"rough goes on from {newest}.",)
    (RunPaths(run_dir).checkpoint(newest) / "manifest.json").unlink()
    first, passed = goes_on_from(run_view(run_dir))
    assert newest not in first and passed.startswith(f"Passed over {newest}, which does not count: ")


@pytest.mark.parametrize("damaged", ["ledger/other.jsonl", "attempts/0001/claim"])
def test_a_resume_that_could_launch_nothing_fails(
    damaged: str, config: Path, started: list[tuple[Mapping[str, Any], Mapping[str, str]]],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    paths = drained_run(config)
    (paths.root / damaged).write_bytes(b"\xff\xfe\n")
    assert run(["resume", "demo", "--runs-root", "runs"]) == 1
    error = capsys.readouterr().err
    assert "nothing was launched" in error and Path(damaged).name in error and "controller --once" in error
    assert len(started) == 1


def test_resume_with_changes_writes_a_whole_revision(
    config: Path, started: list[tuple[Mapping[str, Any], Mapping[str, str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    paths = drained_run(config)
    changes = [
        "--set",
        "recovery.spares=2",
        "--set",
        "optimizer.weight_decay=0.2",
        "--set",
        "slurm.env.HF_TOKEN=hunter4",
    ]
    assert run(["resume", "demo", "--runs-root", "runs", "--why", "flaky nodes", *changes]) == 0
    out = capsys.readouterr().out
    assert "Wrote revision 2" in out and "optimizer.weight_decay changes from step 0 on" in out
    text = (paths.root / "revisions" / "0002.yaml").read_text()
    assert "flaky nodes" in text and "hunter" not in text and "spares: 2" in text and "weight_decay: 0.2" in text
    plan, env = started[-1]
    assert (plan["num_spares"], plan["config"], env) == (2, "revisions/0002.yaml", {"HF_TOKEN": "hunter4"})
    assert str(paths.root / "revisions" / "0002.yaml") in plan["torchrun"]
    assert "hunter" not in json.dumps(plan)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("model.model_config.hidden_size=64", "fixed"),
        ("general.seed=2", "fixed"),
        ("tokens.batch_accumulation_per_replica=4", "16 samples a step instead of 8"),
        ("recovery.spares=-1", "recovery.spares"),
        ("recovery.sparse=1", "spares"),
        ("no-equals-sign", "KEY=VALUE"),
    ],
)
def test_resume_refuses_and_writes_nothing(
    change: str, words: str, config: Path, started: list[tuple[Mapping[str, Any], Mapping[str, str]]],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    paths = drained_run(config)
    before = kinds(paths.root)
    assert run(["resume", "demo", "--runs-root", "runs", "--set", change]) == 2
    assert words in capsys.readouterr().err
    assert kinds(paths.root) == before and not (paths.root / "revisions").exists() and len(started) == 1


def test_another_layout_of_the_same_batch_is_free(
    config: Path, started: list[tuple[Mapping[str, Any], Mapping[str, str]]]
) -> None:
    drained_run(config)
    changes = [
        "--set",
        "parallelism.dp=1",
        "--set",
        "tokens.batch_accumulation_per_replica=4",
        "--set",
        "slurm.nodes=1",
    ]
    assert run(["resume", "demo", "--runs-root", "runs", *changes]) == 0
    assert started[-1][0]["world_size"] == 2


def test_controller_once_relaunches_what_ended_and_observe_changes_nothing(
    config: Path, started: list[tuple[Mapping[str, Any], Mapping[str, str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    paths = drained_run(config)
    Ledger(paths.root, "cli-x").append(Epoch(1, 1, 1), "resumed", {"by": "me"})
    before = kinds(paths.root)
    assert run(["controller", "--observe", "--runs-root", "runs"]) == 0
    assert "would launch" in capsys.readouterr().out and kinds(paths.root) == before
    assert run(["controller", "--once", "--runs-root", "runs"]) == 0
    assert "launched attempt 2" in capsys.readouterr().out
    (paths.launch_facts).write_text("{")
    assert run(["controller", "--once", "--runs-root", "runs"]) == 1
    assert "launch_facts.json" in capsys.readouterr().err
