"""Names and places of the run directory: inverse of each other, locked by mkdir, owned by the caller."""

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import PawlError
from orchestrator.state.epochs import Epoch
from orchestrator.state.rundir import (
    CheckpointName,
    EntryKind,
    RunPaths,
    check_owner,
    classify_entry,
    make_attempt,
    make_cycle,
    make_layout,
    parse_number,
    parse_outcome_name,
    parse_request_name,
    safe_name,
    supervisor_writer,
)

NAME = "step-000012500.a0003g01c0002"
quick = settings(max_examples=50, deadline=None)


@quick
@given(st.integers(0, 10**12), st.builds(Epoch, st.integers(0, 99999), st.integers(0, 99), st.integers(0, 99999)))
def test_a_checkpoint_is_its_name(step: int, epoch: Epoch) -> None:
    name = CheckpointName(step, epoch)
    paths = RunPaths(Path("r"))
    assert CheckpointName.parse(name.text) == name
    assert classify_entry(name.text) == (EntryKind.COMMITTED, name)
    assert classify_entry(paths.partial(name.text).name) == (EntryKind.PARTIAL, name)
    assert classify_entry(paths.quarantined(name.text).name) == (EntryKind.QUARANTINED, name)
    assert classify_entry(paths.trash(name.text).name) == (EntryKind.TRASH, name)


@quick
@given(st.text(max_size=40))
def test_no_text_makes_the_inverse_raise_and_only_our_names_are_ours(text: str) -> None:
    _, name = classify_entry(text)
    assert (name is None) or text in (
        name.text,
        f".{name.text}.partial",
        f".quarantine-{name.text}",
        f".trash-{name.text}",
    )
    parse_number(text), parse_outcome_name(text), parse_request_name(text)
    assert "/" not in safe_name(text) and not safe_name(text).startswith(".") and safe_name(text)


@pytest.mark.parametrize(
    "entry",
    [
        "30",
        "9999",
        "tmp-40",
        "50",
        "latest",
        "step-12500",
        "step-000012500",
        f"{NAME}.bak",
        f"{NAME}\n",
        f" {NAME}",
        "step-0000000012500.a0003g01c0002",
        f".{NAME}",
        f"{NAME}.partial",
        "step-٠٠٠٠٠٠٠٠١.a0003g01c0002",
    ],
)
def test_names_that_pawl_never_writes_are_foreign(entry: str) -> None:
    assert classify_entry(entry) == (EntryKind.FOREIGN, None)


def test_the_names_of_the_page() -> None:
    paths = RunPaths(Path("/runs/x"))
    assert paths.relative(paths.cycle_file(3, 1)) == "attempts/0003/cycles/0001/cycle.json"
    assert paths.relative(paths.outcome(3, 1, 42)) == "attempts/0003/cycles/0001/outcomes/rank-00042.json"
    assert paths.relative(paths.stacks(3, 1, 0)) == "attempts/0003/cycles/0001/evidence/rank-00000.stacks"
    assert paths.relative(paths.partial(NAME)) == f"checkpoints/.{NAME}.partial"
    assert paths.ledger_file(supervisor_writer(Epoch(3, 1, 0))).name == "attempt-0003-g01.jsonl"
    assert parse_outcome_name("rank-00042.json") == 42 and parse_number("0003") == 3
    assert parse_request_name("save-now-01ARZ3NDEKTSV4RRFFQ69G5FAV") == ("save-now", "01ARZ3NDEKTSV4RRFFQ69G5FAV")


@pytest.mark.parametrize("text", ["3", "00003", "0000", "-001", "0003 ", "٠٠٠٣"])
def test_other_spellings_are_no_number(text: str) -> None:
    assert parse_number(text) is None


@pytest.mark.parametrize("node", ["../../etc", ".hidden", "a/b", "nö\nde", "x" * 500, ""])
def test_a_node_cannot_choose_a_path(node: str) -> None:
    """X1 (cyclecloud-slurm#548)."""
    path = RunPaths(Path("/r")).beat(1, node)
    assert path.parent == Path("/r/attempts/0001/beats") and path.name not in ("", ".", "..")


def test_the_layout_keeps_control_to_its_owner(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "runs" / "x")
    make_layout(paths)
    assert stat.S_IMODE(paths.control.stat().st_mode) == 0o700
    assert stat.S_IMODE(paths.ledger.stat().st_mode) & 0o027 == 0
    with pytest.raises(FileExistsError):
        make_layout(paths)


def test_an_attempt_and_a_cycle_are_taken_once(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "x")
    make_layout(paths)
    assert [make_attempt(paths, 1), make_attempt(paths, 1), make_attempt(paths, 2)] == [True, False, True]
    assert [make_cycle(paths, Epoch(1, 1, 1)), make_cycle(paths, Epoch(1, 2, 1))] == [True, False]
    assert paths.outcomes(1, 1).is_dir() and paths.logs(1, 1).is_dir() and paths.evidence(1, 1).is_dir()


def test_only_own_and_unshared_runs_are_acted_on(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    with pytest.raises(PawlError, match="run directory"):
        check_owner(paths)
    paths.config.write_text("")
    paths.config.chmod(0o640)
    check_owner(paths)
    paths.config.chmod(0o660)
    with pytest.raises(PawlError, match="chmod go-w"):
        check_owner(paths)


def test_a_run_of_someone_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = RunPaths(tmp_path)
    paths.config.write_text("")
    monkeypatch.setattr(os, "geteuid", lambda: paths.config.stat().st_uid + 1)
    with pytest.raises(PawlError, match="controls only your own"):
        check_owner(paths)
