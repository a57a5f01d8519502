"""drain, cancel, save-now: the request is left, the answer awaited; export: the trainer's converter on what counts."""

import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import launch_cases as cases
import pytest
from run_factory import Story

from orchestrator.cli.actions import request as action
from orchestrator.cli.app import run
from orchestrator.errors import UsageError
from orchestrator.state.codec import dumps
from orchestrator.state.epochs import Epoch
from orchestrator.state.fsio import list_names
from orchestrator.state.ledger import Ledger, read_all
from orchestrator.state.records import Manifest, ManifestState
from orchestrator.state.requests import acknowledge, read_requests
from orchestrator.state.retention import Retention
from orchestrator.state.rundir import RunPaths
from orchestrator.submit import submit
from orchestrator.views import logs
from orchestrator.views.records import CheckpointView, RunView
from orchestrator.views.run_view import RunInputs, build_view


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """A run with one attempt that trains, as its ledger tells it."""
    monkeypatch.setenv("PAWL_RUNS", str(tmp_path / "runs"))
    made = submit.make_run(
        tmp_path / "runs",
        submit.NewRun(
            facts=cases.make_facts(), config_text="general: {run: demo}\n", secret_env={}, provenance={},
            run_created={"run": "demo", "world_size": 8, "launcher": "local"}, retention=Retention(),
        ),
        writer="cli-x",
    )  # fmt: skip
    supervisor = Ledger(made.root, "attempt-0001-g01")
    supervisor.append(Epoch(1, 0, 0), "attempt_started", {"nonce": "n", "host": "elsewhere", "pid": 1, "nodes": []})
    supervisor.append(Epoch(1, 1, 1), "cycle_started", {"nodes": ["node0"], "resume_from": None, "world_size": 8})
    supervisor.append(Epoch(1, 1, 1), "cycle_running", {"step": 1, "start_s": 1.0, "load_s": 0.0})
    return made


def view_of(story: Story) -> RunView:
    return build_view(RunInputs(now=story.now, run_dir="runs/demo", events=tuple(story.events)))


@pytest.fixture
def answer(paths: RunPaths) -> Iterator[list[str]]:
    """A supervisor that answers each request with the next word of the list (nothing while it is empty)."""
    words: list[str] = []
    over = threading.Event()

    def serve() -> None:
        ledger = Ledger(paths.root, "attempt-0001-g01")
        while not over.is_set():
            for request in read_requests(paths)[0]:
                if words:
                    acknowledge(paths, ledger, Epoch(1, 1, 1), request, result=words.pop())
            time.sleep(0.02)

    thread = threading.Thread(target=serve)
    thread.start()
    yield words
    over.set()
    thread.join()


@pytest.mark.parametrize(
    ("verb", "word", "said"),
    [("drain", "drained", "nothing running"), ("cancel", "cancelled", "was ended"), ("save-now", "saved", "trains on")],
)
def test_an_answered_request_says_what_happened(
    verb: str, word: str, said: str, paths: RunPaths, answer: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    answer.append(word)
    assert run([verb, "demo", "--timeout", "20"]) == 0
    assert said in capsys.readouterr().out
    deadline = time.monotonic() + 20
    while list_names(paths.control) != ():  # whoever acknowledges removes the file after the ledger's line
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_drain_claims_a_checkpoint_only_when_there_is_a_new_one() -> None:
    story = Story()
    story.create()
    story.attempt()
    story.cycle()
    before = view_of(story)
    assert action.answer("drained", before=before, after=before) == (
        "demo had nothing running that could write a newer checkpoint and ended. Go on from the beginning with: "
        "pawl resume demo"
    )
    assert "Go on from the beginning" in action.answer("cancelled", before=before, after=before)
    found = CheckpointView(
        name="step-000000007.a0001g01c0001", step=7, epoch="a", bytes=1, committed_unix=1.0, counts=True, why_not=None
    )
    after = replace(before, checkpoints=(found,))
    assert "wrote its last checkpoint and ended. Go on from step-0" in action.answer(
        "drained", before=before, after=after
    )
    assert "nothing running" in action.answer("drained", before=after, after=after)
    assert "Go on from step-000000007" in action.answer("cancelled", before=after, after=after)


@pytest.fixture
def recorded(paths: RunPaths) -> Iterator[RunPaths]:
    """A supervisor that answers a profile with two traces."""
    over = threading.Event()

    def serve() -> None:
        ledger, folder = Ledger(paths.root, "attempt-0001-g01"), paths.profile("step-000000005.a0001g01c0001")
        while not over.is_set():
            for request in read_requests(paths)[0]:
                folder.mkdir(parents=True)
                for rank in request.ranks or ():
                    (folder / f"rank-{rank:05d}.json.gz").write_bytes(b"")
                    (folder / f"rank-{rank:05d}.txt").write_text(f"rank {rank}, {request.steps} steps\n  3.1 ms mm\n")
                where = paths.relative(folder)
                acknowledge(paths, ledger, Epoch(1, 1, 1), request, result="profiled", where=where)
            time.sleep(0.02)

    thread = threading.Thread(target=serve)
    thread.start()
    yield paths
    over.set()
    thread.join()


def test_profile_says_where_the_traces_are_and_what_took_the_time(
    recorded: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["profile", "demo", "--steps", "4", "--ranks", "3,1", "--timeout", "20"]) == 0
    said = capsys.readouterr().out
    folder = recorded.profile("step-000000005.a0001g01c0001")
    assert f"{folder}/rank-00001.json.gz" in said and f"{folder}/rank-00003.json.gz" in said
    assert "ui.perfetto.dev" in said and "rank 1, 4 steps\n  3.1 ms mm" in said
    assert run(["status", "demo"]) == 0
    assert "profile/step-000000005.a0001g01c0001" in re.sub(r"\s+", "", capsys.readouterr().out)


@pytest.mark.parametrize("word", ["not profiled", "drained", "cancelled"])
def test_a_profile_of_which_nothing_came_is_a_failure(
    word: str, paths: RunPaths, answer: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    answer.append(word)
    assert run(["profile", "demo", "--timeout", "20"]) == 1
    error = capsys.readouterr().err
    assert ("recorded nothing" in error) is (word == "not profiled") and "demo" in error


def test_a_run_that_is_over_cannot_be_profiled(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    Ledger(paths.root, "ctl-x").append(Epoch(1, 1, 1), "run_held", {"rule": "crash-loop", "reason": "r", "hint": "h"})
    assert run(["profile", "demo"]) == 1
    assert "nothing trains" in capsys.readouterr().err and list_names(paths.control) == ()


def test_ranks_are_a_list_or_all() -> None:
    assert action.parse_ranks("3,0,3", world_size=4) == (0, 3) and action.parse_ranks("all", world_size=4) is None
    for text, said in (
        ("", "no list"),
        ("0-3", "no list"),
        ("-1", "no list"),
        ("1,4", "ranks 0 to 3"),
        ("x", "no list"),
    ):
        with pytest.raises(UsageError, match=said):
            action.parse_ranks(text, world_size=4)


def test_another_answer_is_a_failure(paths: RunPaths, answer: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    answer.append("failed")
    assert run(["drain", "demo", "--timeout", "20"]) == 1
    assert "failed" in capsys.readouterr().err


def test_silence_is_said_and_the_request_stands(
    paths: RunPaths, answer: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["drain", "demo", "--timeout", "0.3"]) == 1
    assert "did not acknowledge" in capsys.readouterr().err
    (request,) = read_requests(paths)[0]
    path = paths.request("drain", request.id)
    assert path.stat().st_mode & 0o777 == 0o600 and json.loads(path.read_text())["verb"] == "drain"


def test_ctrl_c_leaves_the_request(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", interrupt)
    assert run(["save-now", "demo"]) == 0
    assert "the request stands" in capsys.readouterr().out
    assert len(read_requests(paths)[0]) == 1


def test_a_run_that_is_over_is_asked_nothing(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    Ledger(paths.root, "ctl-x").append(Epoch(1, 1, 1), "run_held", {"rule": "crash-loop", "reason": "r", "hint": "h"})
    assert run(["drain", "demo"]) == 0
    assert "held" in capsys.readouterr().out.lower()
    assert list_names(paths.control) == ()
    assert run(["status", "demo"]) == 3


def test_a_run_that_others_may_write_is_not_controlled(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    paths.config.chmod(0o666)
    assert run(["cancel", "demo"]) == 1
    assert "chmod" in capsys.readouterr().err
    assert list_names(paths.control) == ()


def commit(paths: RunPaths, step: int) -> str:
    """A checkpoint by name and manifest alone, of a launch that is on record."""
    epoch = Epoch(1, 1, 1)
    name = f"step-{step:09d}.{epoch.text}"
    paths.checkpoint(name).mkdir()
    manifest = Manifest(
        run="demo", step=step, epoch=epoch.text, files=(), total_bytes=0, pawl_version="0", torch_version="0",
        created_unix=1.0, state=ManifestState(step=step, consumed_samples=0, consumed_tokens=0, adam_t=step),
    )  # fmt: skip
    (paths.checkpoint(name) / "manifest.json").write_text(dumps(manifest))
    return name


@pytest.fixture
def converted(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Command lines that export gave to the trainer; a run with checkpoints of steps 10 and 20."""
    cycle = paths.cycle(1, 1)
    cycle.mkdir(parents=True)
    record = {
        "schema_version": 1, "run": "demo", "epoch": {"attempt": 1, "generation": 1, "cycle": 1}, "nonce": "n",
        "resume_from": None, "skip_windows": [], "nodes": [], "ranks_per_node": 4, "world_size": 8,
        "master_addr": "127.0.0.1", "master_port": 1, "config": "run.yaml", "beat_interval_s": 1, "created_unix": 1,
    }  # fmt: skip
    paths.cycle_file(1, 1).write_text(json.dumps(record))
    for step in (10, 20):
        commit(paths, step)
    calls: list[list[str]] = []

    def convert(command: str, arguments: list[str], *, prog: str) -> int:
        assert prog == "pawl export"
        calls.append([command, *arguments])
        return 0

    monkeypatch.setattr("orchestrator.cli.actions.convert.pass_to_trainer", convert)
    return calls


@pytest.mark.parametrize(("options", "step"), [([], 20), (["--step", "10"], 10)])
def test_export_converts_the_newest_that_counts_or_the_one_asked_for(
    options: list[str], step: int, paths: RunPaths, converted: list[list[str]], tmp_path: Path
) -> None:
    out = tmp_path / "it's out"
    assert run(["export", "demo", "--out", str(out), *options]) == 0
    source = str(paths.checkpoint(f"step-{step:09d}.a0001g01c0001"))
    assert converted == [["convert", "--checkpoint-path", source, "--save-path", str(out), "--target-format", "hf"]]
    assert (read_all(paths.root)[-1].kind, read_all(paths.root)[-1].data["step"]) == ("export", step)


def test_export_of_another_step_lists_what_there_is(
    converted: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["export", "demo", "--out", str(tmp_path / "o"), "--step", "15"]) == 2
    assert "10, 20" in capsys.readouterr().err and converted == []


def test_export_says_which_newer_checkpoint_it_passed_over_and_why(
    paths: RunPaths, converted: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = "step-000000020.a0001g01c0001"
    (paths.checkpoint(newest) / "manifest.json").unlink()
    assert run(["export", "demo", "--out", str(tmp_path / "o")]) == 0
    out = capsys.readouterr().out
    assert f"Passed over {newest}, which does not count: " in out and "manifest" in out
    assert out.index("Exporting step-000000010") < out.index("Passed over")
    assert run(["export", "demo", "--out", str(tmp_path / "p"), "--step", "20"]) == 2
    assert run(["export", "demo", "--out", str(tmp_path / "q"), "--step", "10"]) == 0
    assert "Passed over" not in capsys.readouterr().out
    (paths.checkpoint("step-000000010.a0001g01c0001") / "manifest.json").unlink()
    assert run(["export", "demo", "--out", str(tmp_path / "r")]) == 2
    assert f"{newest} does not count: " in capsys.readouterr().err


def test_export_overwrites_nothing(
    converted: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "config.json").write_text("{}")
    assert run(["export", "demo", "--out", str(tmp_path / "o")]) == 2
    assert "another --out" in capsys.readouterr().err and converted == []


def test_export_without_a_checkpoint_says_how_to_get_one(
    paths: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["export", "demo", "--out", str(tmp_path / "o")]) == 2
    assert "pawl save-now demo" in capsys.readouterr().err


def test_ctrl_c_in_logs_leaves_the_run_going_and_says_so(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(logs, "run", interrupt)
    assert run(["logs", "demo", "-f"]) == 0
    assert "demo goes on" in capsys.readouterr().err
