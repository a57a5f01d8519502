"""`pawl resume` and `pawl controller` as commands, on runs whose local launcher starts nothing."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from run_stories import rough
from submit_world import Started, kinds

from orchestrator.cli.actions.launch import goes_on_from
from orchestrator.cli.app import run
from orchestrator.state.history import History
from orchestrator.state.ledger import Ledger, read_all
from orchestrator.state.records import Epoch
from orchestrator.state.rundir import RunPaths
from orchestrator.submit import space
from orchestrator.views.run_view import run_view


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


def test_a_run_whose_checkpoints_are_gone_is_not_said_to_begin_again(tmp_path: Path) -> None:
    view = replace(run_view(tmp_path), run="lost", checkpoints=())
    (line,) = goes_on_from(view, History(best_step=60))
    assert "had a checkpoint of step 60" in line and "pawl resume lost --from-start" in line
    for history in (History(), History(best_step=60, may_start_over=True)):
        assert goes_on_from(view, history) == ("lost goes on from the beginning.",)


def test_resume_goes_on_after_a_drain(config: Path, started: Started, capsys: pytest.CaptureFixture[str]) -> None:
    paths = drained_run(config)
    assert run(["resume", "demo", "--runs-root", "runs"]) == 0
    out = capsys.readouterr().out
    assert "launched attempt 2" in out and "demo goes on from the beginning." in out
    assert [plan["attempt"] for plan, _ in started] == [1, 2]
    assert kinds(paths.root)[-5:] == ["attempt_ended", "resumed", "decision", "attempt_intent", "attempt_submitted"]


def test_a_resume_names_the_damaged_checkpoints_it_passes_over(tmp_path: Path) -> None:
    run_dir = rough().write(tmp_path)
    newest = run_view(run_dir).checkpoints[0].name
    assert goes_on_from(run_view(run_dir), History()) == (f"rough goes on from {newest}.",)
    (RunPaths(run_dir).checkpoint(newest) / "manifest.json").unlink()
    first, passed = goes_on_from(run_view(run_dir), History())
    assert newest not in first and passed.startswith(f"Passed over {newest}, which does not count: ")


@pytest.mark.parametrize("damaged", ["ledger/other.jsonl", "attempts/0001/claim"])
def test_a_resume_that_could_launch_nothing_fails(
    damaged: str, config: Path, started: Started,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    paths = drained_run(config)
    (paths.root / damaged).write_bytes(b"\xff\xfe\n")
    assert run(["resume", "demo", "--runs-root", "runs"]) == 1
    error = capsys.readouterr().err
    assert "nothing was launched" in error and Path(damaged).name in error and "controller --once" in error
    assert len(started) == 1


def test_resume_with_changes_writes_a_whole_revision(
    config: Path, started: Started, capsys: pytest.CaptureFixture[str]
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
    change: str, words: str, config: Path, started: Started,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    paths = drained_run(config)
    before = kinds(paths.root)
    assert run(["resume", "demo", "--runs-root", "runs", "--set", change]) == 2
    assert words in capsys.readouterr().err
    assert kinds(paths.root) == before and not (paths.root / "revisions").exists() and len(started) == 1


def test_a_fixed_key_is_answered_with_the_fork_that_would_do_it(
    config: Path, started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    drained_run(config)
    words = ["--set", "general.seed=2", "--set", "slurm.env.HF_TOKEN=hunter4"]
    assert run(["resume", "demo", "--runs-root", "runs", *words]) == 2
    error = capsys.readouterr().err
    assert "pawl fork demo --run demo-2 --set general.seed=2 --set 'slurm.env.HF_TOKEN=***'" in error


def test_more_steps_of_a_finished_run_are_a_fork_and_the_command_is_said(
    config: Path, started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = drained_run(config)
    Ledger(paths.root, "attempt-0001-g01").append(Epoch(1, 1, 1), "run_done", {"step": 20})
    before = kinds(paths.root)
    assert run(["resume", "demo", "--runs-root", "runs", "--set", "tokens.train_steps=40"]) == 2
    assert "pawl fork demo --run demo-2 --set tokens.train_steps=40" in capsys.readouterr().err
    assert kinds(paths.root) == before


def test_new_code_is_recorded_and_the_record_before_stays(
    config: Path, started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = drained_run(config)
    old = json.loads(paths.provenance.read_text())
    older = {**old, "git": {"commit": "0123456789abcdef", "diff_bytes": 0}, "versions": {"torch": "2.13.0"}}
    paths.provenance.write_text(json.dumps(older))
    assert run(["resume", "demo", "--runs-root", "runs", "--code", "current"]) == 0
    out = capsys.readouterr().out
    assert (
        "Code from now on: commit 0123456789ab → unknown" in out and f"pawl unknown → {old['versions']['pawl']}" in out
    )
    assert json.loads((paths.code / "provenance-0001.json").read_text()) == older
    new = json.loads(paths.provenance.read_text())
    assert new["versions"] == old["versions"] and new["workdir"] == old["workdir"]
    assert next(e.data for e in read_all(paths.root) if e.kind == "resumed")["code"] == "current"
    assert run(["resume", "demo", "--runs-root", "runs", "--code", "v2"]) == 2


def test_a_resume_that_wants_more_room_than_there_is_changes_nothing(
    config: Path, started: Started, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = drained_run(config)
    monkeypatch.setattr(space, "free_bytes", lambda _: 1000)
    assert run(["resume", "demo", "--runs-root", "runs", "--set", "checkpoints.keep_last=9"]) == 1
    error = capsys.readouterr().err
    assert "There is no room" in error and "checkpoints.keep_last" in error
    assert not (paths.root / "revisions").exists() and "resumed" not in kinds(paths.root)


def test_another_layout_of_the_same_batch_is_free(config: Path, started: Started) -> None:
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
    config: Path, started: Started, capsys: pytest.CaptureFixture[str]
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
