"""`pawl ckpt` and `pawl clean`: what is listed, what is refused with its reason, what is removed."""

import json
import os
import time
from pathlib import Path

import orch_worlds as w
import pytest
from checkpoint_folders import names, save, start

from orchestrator.cli.actions import ckpt as action
from orchestrator.cli.app import run
from orchestrator.errors import UsageError
from orchestrator.state.codec import dumps
from orchestrator.state.epochs import PLAIN_EPOCH, Epoch
from orchestrator.state.ledger import Ledger, read_all
from orchestrator.state.records import Intent
from orchestrator.state.run_at import RunAt, need_checkpoint, parse_run_at
from orchestrator.state.rundir import RunPaths, make_attempt, make_layout

E1, E2 = Epoch(1, 1, 1), Epoch(2, 1, 1)


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """Two launches, both over; the second went back to step 3."""
    monkeypatch.setenv("PAWL_RUNS", str(tmp_path))
    found = RunPaths(tmp_path / "x")
    make_layout(found)
    found.config.write_text("general: {run: x}\ncheckpoints: {keep_last: 2}\n")
    for epoch, resume_from, steps in ((E1, None, (1, 2, 3, 4)), (E2, w.name(3, E1), (5, 6, 7))):
        make_attempt(found, epoch.attempt)
        intent = Intent(attempt=epoch.attempt, nonce="n", launcher="local", by="ada", created_unix=1.0)
        found.intent(epoch.attempt).write_text(dumps(intent))
        start(found, epoch, resume_from)
        for step in steps:
            save(found, step, epoch)
        end = {"attempt": epoch.attempt, "outcome": "drained", "reason": "asked", "rule": "drained"}
        Ledger(found.root, f"attempt-{epoch.attempt:04d}-g01").append(epoch, "attempt_ended", end)
    return found


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, object]]:
    capsys.readouterr()
    assert run(["ckpt", "ls", "x", "--json"]) == 0
    return {item["name"]: item for item in json.loads(capsys.readouterr().out)["checkpoints"]}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("demo", RunAt(run="demo")),
        ("demo@40", RunAt(run="demo", step=40)),
        ("runs/de@mo@40", RunAt(run="runs/de@mo", step=40)),
        ("de@mo", RunAt(run="de@mo")),
        ("demo@", RunAt(run="demo@")),
        ("@40", RunAt(run="@40")),
        (f"d@{w.name(4)}", RunAt(run="d", entry=w.name(4))),
        (f"d@.quarantine-{w.name(4)}", RunAt(run="d", entry=f".quarantine-{w.name(4)}")),
        ("d@-4", RunAt(run="d@-4")),
        ("d@٤", RunAt(run="d@٤")),
    ],
)
def test_run_at_step(text: str, found: RunAt) -> None:
    assert parse_run_at(text) == found and found.text == text


def test_a_checkpoint_must_be_named_where_one_is_meant() -> None:
    with pytest.raises(UsageError, match=r"RUN@STEP.*pawl ckpt ls demo"):
        need_checkpoint("demo")


def test_ls_says_what_counts_what_stays_and_why(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    paths.partial(w.name(8, E2)).mkdir()
    paths.quarantined(w.name(2, E1)).mkdir()
    found = listed(capsys)
    assert found[w.name(7, E2)]["stays"] == found[w.name(6, E2)]["stays"] == "one of the last two that count"
    assert found[w.name(3, E1)]["resumed_from"] and found[w.name(3, E1)]["stays"] == "the newest launch resumed from it"
    assert found[w.name(5, E2)]["counts"] and found[w.name(5, E2)]["stays"] is None
    assert found[w.name(4, E1)]["why_not"] == "a later launch went back before this step"
    assert found[f".{w.name(8, E2)}.partial"]["why_not"] == "was never completed"
    assert found[f".quarantine-{w.name(2, E1)}"]["kind"] == "quarantined"
    assert found[w.name(1, E1)]["bytes"] == 4 and found[w.name(1, E1)]["mesh"] is None
    assert run(["ckpt", "ls", "x"]) == 0
    text = capsys.readouterr().out
    assert "may go: retention asks for no more" in text and "no: a later launch went back" in text
    assert f"{w.name(3, E1)} *" in text


def test_keep_and_release_are_facts_of_the_ledger(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ckpt", "keep", "x@5", "--name", "before the decay"]) == 0
    item = listed(capsys)[w.name(5, E2)]
    assert (item["kept_name"], item["stays"]) == ("before the decay", "kept by name")
    assert run(["ckpt", "rm", "x@5", "--yes"]) == 1
    assert f"pawl ckpt release x@{w.name(5, E2)}" in capsys.readouterr().err
    assert run(["ckpt", "release", "x@5"]) == 0
    assert listed(capsys)[w.name(5, E2)]["stays"] is None
    assert run(["ckpt", "release", "x@5"]) == 2
    assert "Kept are: none" in capsys.readouterr().err
    assert [e.kind for e in read_all(paths.root)][-2:] == ["checkpoint_kept", "checkpoint_released"]


def test_keep_says_when_the_checkpoint_went_at_that_moment(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Ledger.append

    def append(self: Ledger, *args: object) -> object:
        os.rename(paths.checkpoint(w.name(5, E2)), paths.trash(w.name(5, E2)))
        return real(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Ledger, "append", append)
    assert run(["ckpt", "keep", "x@5"]) == 1
    assert "at this very moment" in capsys.readouterr().err


def test_rm_removes_one_and_says_so_in_the_ledger(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    before = names(paths)
    assert run(["ckpt", "rm", "x@5", "--yes"]) == 0
    assert before - names(paths) == {w.name(5, E2)}
    last = read_all(paths.root)[-1]
    assert last.kind == "checkpoint_removed" and last.data["name"] == w.name(5, E2)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("x@7", "one of the last two that count"),
        ("x@6", "one of the last two that count"),
        ("x@3", "the newest launch resumed from it"),
        ("x@4", "a later launch went back before this step. Name one of these exactly"),
        ("x@99", "no checkpoint of step 99. Those that count are of steps 1, 2, 3, 5, 6, 7."),
        ("x@step-000000099.a0001g01c0001", "has no step-000000099"),
        ("x", "names no checkpoint"),
        ("y@4", "There is no run 'y'"),
    ],
)
def test_rm_refuses_with_the_reason(
    what: str, words: str, paths: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    before = names(paths)
    assert run(["ckpt", "rm", what, "--yes"]) in (1, 2)
    assert words in capsys.readouterr().err and names(paths) == before


def test_rm_asks_and_without_a_terminal_wants_yes(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = names(paths)
    assert run(["ckpt", "rm", "x@5"]) == 2
    assert "--yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for answer, code in ((False, 1), (True, 0)):
        monkeypatch.setattr("typer.confirm", lambda _, answer=answer: answer)
        assert names(paths) == before
        assert run(["ckpt", "rm", "x@5"]) == code
    assert w.name(5, E2) not in names(paths)


def test_what_does_not_count_can_be_removed_by_its_whole_name(paths: RunPaths) -> None:
    assert run(["ckpt", "rm", f"x@{w.name(4, E1)}", "--yes"]) == 0
    assert w.name(4, E1) not in names(paths)


def live(paths: RunPaths) -> None:
    """A third attempt whose supervisor is this very process' machine's: nobody has seen it end."""
    make_attempt(paths, 3)
    intent = Intent(attempt=3, nonce="n3", launcher="slurm", by="ada", created_unix=1.0)
    paths.intent(3).write_text(dumps(intent))
    start(paths, Epoch(3, 1, 1), w.name(7, E2))


def test_the_unfinished_folder_of_a_live_launch_is_never_touched(
    paths: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new, plain = (paths.partial(w.name(8, epoch)) for epoch in (E2, Epoch(3, 1, 1), PLAIN_EPOCH))
    live(paths)
    for folder in (old, new, plain):
        folder.mkdir()
    assert run(["ckpt", "rm", f"x@{new.name}", "--yes"]) == 1
    assert "may be written at this moment: attempt 3 may still run" in capsys.readouterr().err
    assert run(["clean", "x", "--apply"]) == 0
    assert "STAYS: it may be written at this moment" in capsys.readouterr().out
    assert new.exists() and plain.exists() and not old.exists()


def test_a_launch_that_begins_meanwhile_gets_its_checkpoint_back(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = os.rename

    def rename(*args: object, **kwargs: object) -> None:
        real(*args, **kwargs)  # type: ignore[arg-type]
        monkeypatch.setattr(os, "rename", real)
        make_attempt(paths, 3)
        start(paths, Epoch(3, 1, 1), w.name(5, E2))

    before = names(paths)
    monkeypatch.setattr(os, "rename", rename)
    assert run(["ckpt", "rm", "x@5", "--yes"]) == 1
    assert "later than this one" in capsys.readouterr().err and names(paths) == before


def test_clean_lists_with_sizes_and_removes_only_when_told(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    bad = save(paths, 9, E2)
    (bad / "rank-00000.safetensors").unlink()
    for folder in (paths.quarantined(w.name(2, E1)), paths.partial(w.name(4, E1)), paths.trash(w.name(9, E1))):
        folder.mkdir()
        (folder / "file").write_bytes(b"x" * 1000)
    (paths.logs(1, 1) / "node0.log").write_bytes(b"x" * 500)
    os.utime(paths.logs(1, 1) / "node0.log", (1, 1))
    (paths.logs(2, 1) / "node0.log").write_bytes(b"x" * 500)
    os.utime(paths.logs(2, 1) / "node0.log", (1, 1))
    before = names(paths)
    assert run(["clean", "x", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    kinds = {(item["kind"], Path(item["path"]).name) for item in document["items"] if item["stays"] is None}
    assert kinds == {
        *(("superseded", w.name(step, E1)) for step in (1, 2, 4)), ("superseded", w.name(5, E2)),
        ("quarantined", f".quarantine-{w.name(2, E1)}"), ("partial", f".{w.name(4, E1)}.partial"),
        ("trash", f".trash-{w.name(9, E1)}"), ("logs", "logs"),
    }  # fmt: skip
    assert document["total_bytes"] == 4 * 4 + 3 * 1000 + 500 and document["removed"] == []
    broken = next(item for item in document["items"] if item["kind"] == "broken")
    assert broken["stays"] and broken["path"].endswith(w.name(9, E2))
    assert run(["clean", "x"]) == 0 and names(paths) == before
    text = capsys.readouterr().out
    assert "3.52 kB may go" in text and "pawl clean x --apply" in text
    assert run(["clean", "x", "--apply"]) == 0
    assert "Removed 8 items, 3.52 kB." in capsys.readouterr().out
    assert names(paths) == {w.name(3, E1), w.name(6, E2), w.name(7, E2), w.name(9, E2)}
    assert not paths.logs(1, 1).exists() and (paths.logs(2, 1) / "node0.log").exists()
    assert run(["clean", "x", "--apply"]) == 0
    assert "0 B may go" in capsys.readouterr().out


def test_young_logs_stay(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    log = paths.logs(1, 1) / "node0.log"
    log.write_bytes(b"x" * 500)
    day_old = time.time() - 90_000
    os.utime(log, (day_old, day_old))
    assert run(["clean", "x", "--json"]) == 0
    assert not [i for i in json.loads(capsys.readouterr().out)["items"] if i["kind"] == "logs"]
    assert run(["clean", "x", "--json", "--logs-older-than", "1"]) == 0
    assert [i["bytes"] for i in json.loads(capsys.readouterr().out)["items"] if i["kind"] == "logs"] == [500]


def test_without_its_ledger_nothing_is_judged(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    (paths.ledger / "cli-y.jsonl").write_bytes(b"\xff\xfe\n")
    before = names(paths)
    for words in (["clean", "x", "--apply"], ["ckpt", "rm", "x@1", "--yes"]):
        assert run(words) == 1
        assert "cli-y.jsonl" in capsys.readouterr().err
    assert names(paths) == before


def test_verify_names_the_damaged_one_and_what_to_do(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def inspect(command: str, arguments: list[str], *, prog: str) -> int:
        asked.append(Path(arguments[0]).name)
        return int(asked[-1] in (w.name(7, E2), w.name(4, E1)))

    monkeypatch.setattr(action, "pass_to_trainer", inspect)
    assert run(["ckpt", "verify", "x@5"]) == 0 and asked == [w.name(5, E2)]
    assert run(["ckpt", "verify", "x"]) == 1 and asked[-1] == w.name(7, E2)
    assert f"goes on from the one before ({w.name(6, E2)})" in capsys.readouterr().err
    asked.clear()
    assert run(["ckpt", "verify", "x", "--all"]) == 1 and len(asked) == 7
    assert f"pawl ckpt rm x@{w.name(4, E1)}" in capsys.readouterr().err
    assert run(["ckpt", "verify", "x@5", "--all"]) == 2
