"""Room for checkpoints is judged before a run starts, with its numbers and the keys that change them."""

import json
from dataclasses import replace
from pathlib import Path

import launch_cases as cases
import pytest
from orch_worlds import counting

from orchestrator.cli.app import run
from orchestrator.errors import PawlError
from orchestrator.state.retention import Retention, plan_deletion
from orchestrator.submit import space
from orchestrator.submit.space import Need, need_of, require_room, shortage

FACTS = replace(cases.make_facts(), train_steps=100, checkpoint_interval=10, checkpoint_bytes=1000)


@pytest.mark.parametrize(
    ("retention", "steps", "need"),
    [
        (Retention(), 100, (2, 0, 1)),
        (Retention(keep_last=3, keep_every=40), 100, (3, 1, 1)),
        (Retention(keep_last=2, keep_every=20), 100, (2, 3, 1)),
        (Retention(keep_last=2, keep_every=15), 100, (2, 2, 1)),
        (Retention(keep_last=2), 5, (1, 0, 0)),
        (Retention(keep_last=20), 95, (10, 0, 0)),
        (Retention(keep_last=0), 100, (10, 0, 0)),
    ],
)
def test_what_is_there_at_once(retention: Retention, steps: int, need: tuple[int, int, int]) -> None:
    found = need_of(replace(FACTS, train_steps=steps), retention)
    assert (found.kept, found.for_ever, found.writing) == need
    assert found.total == int(sum(need) * 1000 * 1.01)


@pytest.mark.parametrize("last", [2, 3, 5])
@pytest.mark.parametrize("every", [None, 10, 15, 20, 40, 200])
def test_retention_never_keeps_more_than_was_asked_for(last: int, every: int | None) -> None:
    """Played save by save: what lies there at the fullest moment is what was counted, to the one being written."""
    retention, there, most = Retention(keep_last=last, keep_every=every), set[int](), 0
    for step in range(10, 101, 10):
        most = max(most, len(there) + 1)
        there.add(step)
        plan = plan_deletion(counting(*there), (), retention=retention, resumed_from=None)
        there -= {int(name[5:14]) for name in plan.delete}
    need = need_of(FACTS, retention)
    assert max(most, len(there)) == need.kept + need.for_ever + need.writing


def test_a_shortage_says_numbers_and_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need = Need(kept=2, for_ever=3, writing=1, each=1 << 20)
    monkeypatch.setattr(space, "free_bytes", lambda _: 5 << 20)
    why = shortage("demo", tmp_path / "runs" / "demo", need)
    assert why is not None and str(tmp_path) in why
    assert "2 kept, 3 kept for ever (keep_every) and 1 being written at 1.0 MiB each need 6.1 MiB" in why
    assert "free are 5.0 MiB" in why and "checkpoints.keep_last, keep_every or checkpoint_interval" in why
    assert shortage("demo", tmp_path, need, held=2 << 20) is None
    with pytest.raises(PawlError, match="There is no room"):
        require_room("demo", tmp_path, need)


def test_what_cannot_be_asked_is_unknown_and_refuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def disk_usage(_path: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("shutil.disk_usage", disk_usage)
    need = need_of(FACTS, Retention())
    assert space.free_bytes(tmp_path) is None and shortage("demo", tmp_path, need) is None
    assert "free space unknown" in space.space_line(tmp_path, need)


def test_check_here_finds_it_at_the_line_of_the_key(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["check", str(config), "--here", "--runs-root", "runs", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["space"]
    assert told["quota_bytes"] is None and told["free_bytes"] > told["needed_bytes"] > 0
    monkeypatch.setattr(space, "free_bytes", lambda _: 1000)
    assert run(["check", str(config), "--here", "--runs-root", "runs"]) == 2
    text = capsys.readouterr().out
    assert "checkpoints.keep_last" in text and "There is no room for the checkpoints of 'demo'" in text
    assert run(["submit", str(config), "--launcher", "local", "--runs-root", "runs"]) == 1
    assert "There is no room" in capsys.readouterr().err and not Path("runs").exists()
