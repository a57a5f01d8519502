"""pawl export of several steps, here and as jobs; pawl import. What the converter does, the trainer's tests hold."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.cli.actions import convert
from orchestrator.cli.actions.convert import ExportWish, job_parameters, plan_parts, run_part, site_defaults
from orchestrator.cli.app import run
from orchestrator.errors import UsageError
from orchestrator.state.codec import dumps
from orchestrator.state.epochs import Epoch
from orchestrator.state.ledger import Ledger, read_all
from orchestrator.state.records import Manifest, ManifestState
from orchestrator.state.rundir import RunPaths
from orchestrator.views.run_view import run_view


@pytest.fixture
def run_with_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """A run with checkpoints of steps 10 and 20 that count, by what lies in its directory."""
    monkeypatch.setenv("PAWL_RUNS", str(tmp_path / "runs"))
    paths = RunPaths(tmp_path / "runs" / "demo")
    for folder in (paths.cycle(1, 1), paths.ledger, paths.checkpoints):
        folder.mkdir(parents=True)
    paths.config.write_text("general: {run: demo}\n")
    epoch = {"attempt": 1, "generation": 1, "cycle": 1}
    cycle = {
        "schema_version": 1, "run": "demo", "epoch": epoch, "nonce": "n", "resume_from": None, "skip_windows": [],
        "nodes": [], "ranks_per_node": 1, "world_size": 1, "master_addr": "127.0.0.1", "master_port": 1,
        "config": "run.yaml", "beat_interval_s": 1, "created_unix": 1,
    }  # fmt: skip
    paths.cycle_file(1, 1).write_text(json.dumps(cycle))
    Ledger(paths.root, "attempt-0001-g01").append(
        Epoch(1, 0, 0), "attempt_started", {"nonce": "n", "host": "elsewhere", "pid": 1, "nodes": []}
    )
    for step in (10, 20):
        folder = paths.checkpoint(f"step-{step:09d}.a0001g01c0001")
        folder.mkdir()
        state = ManifestState(step=step, consumed_samples=0, consumed_tokens=0, adam_t=step)
        manifest = Manifest(
            run="demo", step=step, epoch="a0001g01c0001", files=(), total_bytes=0, pawl_version="0",
            torch_version="0", created_unix=1.0, state=state,
        )  # fmt: skip
        (folder / "manifest.json").write_text(dumps(manifest))
    return paths


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the trainer was told, whether here or in a job; nothing is converted."""
    words: list[list[str]] = []

    def here(command: str, arguments: list[str], *, prog: str) -> int:
        words.append([command, prog, *arguments])
        return 0

    def in_a_job(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        words.append([command[3], command[5], *command[6:]])
        return subprocess.CompletedProcess(command, 89 if "step-000000010" in command[7] else 0)

    monkeypatch.setattr(convert, "pass_to_trainer", here)
    monkeypatch.setattr(convert.subprocess, "run", in_a_job)
    return words


def line(paths: RunPaths, step: int, out: Path, *more: str) -> list[str]:
    source = str(paths.checkpoint(f"step-{step:09d}.a0001g01c0001"))
    words = ["--checkpoint-path", source, "--save-path", str(out), "--target-format", "hf", *more]
    return ["convert", "pawl export", *words]


@pytest.mark.parametrize("options", [["--all"], ["--step", "10", "--step", "20"], ["--step", "10", "--step", "20"] * 2])
def test_several_steps_get_a_folder_each(
    options: list[str], run_with_two: RunPaths, told: list[list[str]], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert run(["export", "demo", "--out", str(out), "--dtype", "float32", *options]) == 0
    assert told == [line(run_with_two, n, out / f"step-{n}", "--dtype", "float32") for n in (10, 20)]
    noted = [event.data for event in read_all(run_with_two.root) if event.kind == "export"]
    assert [data["step"] for data in noted] == [10, 20] and noted[0]["out"] == str(out / "step-10")


def test_a_push_names_the_repository_and_a_branch_for_each_step(
    run_with_two: RunPaths, told: list[list[str]], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert run(["export", "demo", "--out", str(out), "--push-to-hub", "me/model"]) == 0
    assert told == [line(run_with_two, 20, out, "--push-to-hub", "me/model")]
    told.clear()
    assert run(["export", "demo", "--out", str(tmp_path / "b"), "--all", "--push-to-hub", "me/model"]) == 0
    assert [words[-2:] for words in told] == [["--revision", "step-10"], ["--revision", "step-20"]]


def test_jobs_are_told_the_same_and_a_failure_is_named(
    run_with_two: RunPaths, told: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(["export", "demo", "--out", str(out), "--all", "--executor", "debug"]) == 1
    assert told == [line(run_with_two, n, out / f"step-{n}") for n in (10, 20)]
    assert "1 of 2 exports failed: step-000000010.a0001g01c0001" in capsys.readouterr().err
    assert [event.data["step"] for event in read_all(run_with_two.root) if event.kind == "export"] == [20]
    assert (out / ".jobs").stat().st_mode & 0o777 == 0o700


def test_real_jobs_run_the_trainers_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """submitit's own processes; the trainer's answer (no checkpoint there) comes back as pawl's exit code."""
    words = ("--checkpoint-path", str(tmp_path / "none"), "--save-path", str(tmp_path / "o"), "--target-format", "hf")
    part = convert.Part(checkpoint=None, out=tmp_path / "o", words=words)  # type: ignore[arg-type]
    wish = ExportWish(out=tmp_path / "o", executor="local")
    assert convert.run_jobs([part], wish, name="x", site={}) == [1]
    logs = "".join(path.read_text() for path in (tmp_path / ".o.jobs").glob("*.err"))
    assert "pawl export: " in logs and "is not a directory" in logs and "Traceback" not in logs
    assert "1 jobs" in capsys.readouterr().out


def test_a_job_without_a_result_is_a_failure_with_its_log(capsys: pytest.CaptureFixture[str]) -> None:
    def lost() -> int:
        raise RuntimeError("Job 7 has not produced any output (state: TIMEOUT)")

    job = SimpleNamespace(job_id="7", result=lost, paths=SimpleNamespace(stderr="x.err"))
    assert convert._result(job) == 1
    assert "job 7: Job 7 has not produced any output (state: TIMEOUT) (log: x.err)" in capsys.readouterr().err


def test_a_job_gets_the_sites_defaults_on_slurm_alone(tmp_path: Path) -> None:
    file = tmp_path / "site.yaml"
    file.write_text("slurm: {account: a, partition: cpu, qos: null, exclusive: true, prologue: module load x}\n")
    assert site_defaults(file) == {"account": "a", "partition": "cpu"} and site_defaults(None) == {}
    on_slurm = job_parameters("n", "slurm", site_defaults(file))
    assert (on_slurm["slurm_account"], on_slurm["slurm_partition"], on_slurm["name"]) == ("a", "cpu", "n")
    assert not any(key.startswith("slurm") for key in job_parameters("n", "local", site_defaults(file)))


def test_wishes_that_contradict_themselves(run_with_two: RunPaths, tmp_path: Path) -> None:
    view, out = run_view(run_with_two.root), tmp_path / "out"
    with pytest.raises(UsageError, match="exclude each other"):
        plan_parts(view, run_with_two, ExportWish(out=out, steps=(10,), every=True))
    with pytest.raises(UsageError, match="no checkpoint of step 15"):
        plan_parts(view, run_with_two, ExportWish(out=out, steps=(10, 15)))
    assert run(["export", "demo", "--out", str(out), "--executor", "cloud"]) == 2


def test_one_taken_folder_stops_all_before_any_work(
    run_with_two: RunPaths, told: list[list[str]], tmp_path: Path
) -> None:
    (tmp_path / "out" / "step-20").mkdir(parents=True)
    (tmp_path / "out" / "step-20" / "config.json").write_text("{}")
    assert run(["export", "demo", "--out", str(tmp_path / "out"), "--all"]) == 2
    assert told == []


def test_import_tells_the_trainer_where_from_and_to(told: list[list[str]], tmp_path: Path) -> None:
    assert run(["import", str(tmp_path / "hf dir"), "--out", str(tmp_path / "ckpt")]) == 0
    source = ["--checkpoint-path", str(tmp_path / "hf dir"), "--save-path", str(tmp_path / "ckpt")]
    assert told == [["convert", "pawl import", *source, "--target-format", "pawl"]]


def test_a_part_is_one_command_of_the_trainer_as_an_argument_list(told: list[list[str]]) -> None:
    assert run_part(["--checkpoint-path", "/a b/$(id)"]) == 0
    assert told == [["convert", "pawl export", "--checkpoint-path", "/a b/$(id)"]]
