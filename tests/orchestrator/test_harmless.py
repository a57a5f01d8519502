"""Text from files is only shown, never obeyed: by every surface, whichever field it stands in."""

import io
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from run_factory import T0, Story
from run_stories import clean, crash_loop, rough

from orchestrator.cli.app import run as pawl
from orchestrator.state.records import Event
from orchestrator.state.rundir import RunPaths
from orchestrator.views import explain, logs, status, watch
from orchestrator.views.human import harmless, harmless_data, harmless_lines
from orchestrator.views.records import RunView
from orchestrator.views.run_view import RunInputs, build_view, run_view

HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m\x1bPq\x1b\\[/red]:smile:\u202eevil\r\n\x00\ud800"


def is_harmless(text: str) -> bool:
    """Nothing but characters that a terminal shows, and line feeds."""
    return all(char == "\n" or (char.isprintable() and not 0xD800 <= ord(char) < 0xE000) for char in text)


def poisoned(value: Any, key: str = "") -> Any:
    """Data of an event with the hostile text behind every text that the view only shows."""
    if isinstance(value, str) and key not in ("outcome", "name", "resume_from", "verb", "action", "id"):
        return value + HOSTILE
    if isinstance(value, list):
        return [poisoned(item, key) for item in value]
    if isinstance(value, dict):
        return {name: poisoned(item, name) for name, item in value.items()}
    return value


def poisoned_view(story: Story) -> RunView:
    events = tuple(
        Event(epoch=e.epoch, seq=e.seq, writer=e.writer, unix=e.unix, kind=e.kind, data=poisoned(e.data))
        for e in story.events
    )
    inputs = RunInputs(
        now=story.now, run_dir=f"/r/{HOSTILE}", events=events, lines=story.step_lines(), targets=(f"h{HOSTILE}:1",),
        problems=(f"could not {HOSTILE}",),
    )  # fmt: skip
    return build_view(inputs)


def texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [] if isinstance(value, Enum) else [value]
    if is_dataclass(value) and not isinstance(value, type):
        return [text for field in fields(value) for text in texts(getattr(value, field.name))]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
    return [text for item in items for text in texts(item)]


@pytest.mark.parametrize("story", [clean(), rough(), crash_loop()], ids=lambda story: str(story.run))
def test_no_field_of_a_view_can_command_a_terminal(story: Story) -> None:
    view = poisoned_view(story)
    assert any("evil" in text for text in texts(view))
    assert [text for text in texts(view) if not is_harmless(text) or "\n" in text] == []


@pytest.mark.parametrize("story", [clean(), rough(), crash_loop()], ids=lambda story: str(story.run))
def test_no_surface_commands_a_terminal_and_brackets_are_no_markup(story: Story) -> None:
    view = poisoned_view(story)
    console = Console(file=io.StringIO(), width=100, color_system=None, markup=False, emoji=False)
    console.print(watch.picture(view))
    assert isinstance(console.file, io.StringIO)
    pages = [
        *(status.render(view, width=100, colour=False), status.render_list([view], width=400, colour=False)),
        *(explain.text(view), console.file.getvalue(), "\n".join(item.text for item in watch.news(view))),
    ]
    assert [page for page in pages if not is_harmless(page)] == []
    assert "[/red]:smile:" in pages[0] and "[/red]:smile:" in pages[2]


@given(text=st.text() | st.text(alphabet="\x1b\x9b\x9d\x90\x07\\[]0;mP\r\n\tab", max_size=20))
def test_whatever_the_text_it_becomes_one_harmless_line(text: str) -> None:
    assert "\n" not in harmless(text) and "\x1b" not in harmless(text)
    assert not any(0x80 <= ord(char) < 0xA0 or (ord(char) < 0x20 and char != "\t") for char in harmless(text))
    assert harmless(harmless(text)) == harmless(text)


def test_what_is_shown_stays() -> None:
    for text in ("Größe 3 µm – ✓ → 日本語 👍", "a\tb", "[bold]x[/bold] :smile:"):
        assert harmless(text) == text
    assert harmless("\x1b[31mred\x1b[0m \x1b]8;;http://x\x1b\\link") == "red link"
    assert harmless_lines("a\x07\nb") == "a \nb"


def test_numbers_and_states_stay_what_they_are() -> None:
    view = build_view(RunInputs(now=T0, run_dir="r", events=tuple(rough().events), lines=rough().step_lines()))
    assert harmless_data(view) == view and harmless_data(replace(view, run="a\x07")).run == "a "


def test_errors_and_logs_of_hostile_names_are_harmless(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = rough().write(tmp_path)
    RunPaths(run_dir).node_log(1, 1, "node0").write_bytes(b"\x1b]0;t\x07one\x9b31m two\x1b[2J\n")
    assert pawl(["logs", "rough", "--runs-root", str(tmp_path)]) == 0
    assert pawl(["status", HOSTILE.replace("\x00", "").replace("\ud800", ""), "--runs-root", str(tmp_path)]) == 2
    moved = run_dir.rename(tmp_path / "\x1b[2Jrough")
    assert pawl(["watch", str(moved)]) == 0
    assert pawl(["status", "--runs-root", str(tmp_path)]) == 0
    assert pawl(["explain", "nobody", "--runs-root", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert is_harmless(out) and is_harmless(err), (out, err)
    assert run_view(moved).run == "rough"


def test_logs_hands_on_no_control_of_any_kind() -> None:
    line = logs.parse_line("[rank0]: " + HOSTILE + "x", cycle="c", node="n")
    assert is_harmless(line.text)
