"""The ledger: merged by (epoch, seq, writer), a torn end ignored, anything else unreadable reported."""

from pathlib import Path

import orch_worlds as w
import pytest

from orchestrator.state.epochs import Epoch
from orchestrator.state.ledger import Ledger, event_line, latest_epoch, parse_lines, read, read_all
from orchestrator.state.rundir import RunPaths, make_layout


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    found = RunPaths(tmp_path / "x")
    make_layout(found)
    return found


def kinds(paths: RunPaths) -> list[str]:
    return [event.kind for event in read_all(paths.root)]


def test_what_was_appended_is_read_in_order_of_epoch_not_of_time(paths: RunPaths) -> None:
    clock = w.HandClock()
    late = Ledger(paths.root, "attempt-0002-g01", clock=clock)
    late.append(Epoch(2, 1, 1), "second", {})
    clock.unix -= 5000
    Ledger(paths.root, "attempt-0001-g01", clock=clock).append(Epoch(1, 1, 1), "first", {"é": None})
    assert kinds(paths) == ["first", "second"]
    assert latest_epoch(read_all(paths.root)) == Epoch(2, 1, 1)


def test_a_word_after_another_sorts_behind_it_whatever_the_clocks_say(paths: RunPaths) -> None:
    """HELD by the supervisor, then resumed by a person on a login node whose clock is an hour slow."""
    supervisor = Ledger(paths.root, "attempt-0001-g01", clock=w.HandClock())
    for number in range(5):
        supervisor.append(Epoch(1, 1, 1), f"e{number}", {})
    supervisor.append(Epoch(1, 1, 1), "run_held", {})
    person = Ledger(paths.root, "cli-01", clock=w.HandClock(unix=w.NOW - 3600))
    person.append(latest_epoch(read_all(paths.root)), "resumed", {"by": "me"})
    supervisor.saw(read_all(paths.root))
    supervisor.append(Epoch(1, 1, 1), "later", {})
    assert kinds(paths)[-3:] == ["run_held", "resumed", "later"]


def test_a_torn_end_is_ignored_and_a_bad_line_reported(paths: RunPaths) -> None:
    ledger = Ledger(paths.root, "a")
    ledger.append(Epoch(1, 1, 1), "whole", {})
    file = paths.ledger_file("a")
    file.write_text(file.read_text() + '{"schema_version": 1, "epo')
    assert (kinds(paths), read(paths.root).problems) == (["whole"], ())
    Ledger(paths.root, "a").append(Epoch(1, 1, 1), "after", {})
    view = read(paths.root)
    assert [event.kind for event in view.events] == ["whole", "after"]
    assert len(view.problems) == 1 and view.problems[0].startswith("a.jsonl:2") and not view.unread


def test_a_file_that_cannot_be_read_is_not_an_empty_one(paths: RunPaths) -> None:
    (paths.ledger / "b.jsonl").mkdir()
    (paths.ledger / "note.txt").write_text("not a ledger")
    assert read(paths.root).unread == ("ledger/b.jsonl: cannot be read",)


def test_the_same_line_twice_counts_once(paths: RunPaths) -> None:
    event = Ledger(paths.root, "a").append(Epoch(1, 1, 1), "x", {})
    view = parse_lines(f"{event_line(event)}\n" * 2, name="a.jsonl")
    (paths.ledger / "copy.jsonl").write_text(f"{event_line(event)}\n")
    assert len(view.events) == 2 and len(read_all(paths.root)) == 1


def test_a_failed_append_leaves_the_next_one_readable(paths: RunPaths) -> None:
    ledger = Ledger(paths.root, "a")
    with pytest.raises(ValueError, match="JSON"):
        ledger.append(Epoch(1, 1, 1), "bad", {"loss": float("nan")})
    assert ledger.append(Epoch(1, 1, 1), "good", {}).seq == 1
    assert kinds(paths) == ["good"]


def test_a_writer_name_cannot_leave_the_folder(paths: RunPaths) -> None:
    assert paths.ledger_file("../../x").parent == paths.ledger


def test_a_missing_ledger_is_unknown_and_not_an_empty_one(paths: RunPaths) -> None:
    assert not read(paths.root).unread
    paths.ledger.rmdir()
    assert read(paths.root).unread == ("ledger/: the folder is missing",)
