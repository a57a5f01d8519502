"""`pawl watch`: only looks, says what happens as it happens, ends with the run, and leaves it going on Ctrl-C."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from run_factory import Story
from run_stories import clean, crash_loop, rough

from orchestrator.views.records import RunView
from orchestrator.views.run_view import RunInputs, build_view
from orchestrator.views.watch import news, picture, run


def view_at(story: Story, fraction: float) -> RunView:
    """The run as it was after that part of its story."""
    now = story.events[0].unix + fraction * (story.now - story.events[0].unix)
    events = tuple(event for event in story.events if event.unix <= now)
    lines = tuple(line for line in story.step_lines() if line.unix <= now)
    return build_view(RunInputs(now=now, run_dir=f"/r/{story.run}", events=events, lines=lines))


def watched(story: Story, *, terminal: bool, looks: int = 12) -> tuple[int, str]:
    moments = iter([*(view_at(story, i / looks) for i in range(looks)), view_at(story, 1.0)])
    console = Console(file=io.StringIO(), force_terminal=terminal, width=110, color_system=None)
    code = run(Path(f"/r/{story.run}"), console=console, look=lambda _: next(moments), sleep=lambda _: None)
    assert isinstance(console.file, io.StringIO)
    return code, console.file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize(("story", "code"), [(clean(), 0), (rough(), 0), (crash_loop(), 3)])
def test_it_ends_with_the_run_and_says_how(story: Story, code: int, terminal: bool) -> None:
    result, text = watched(story, terminal=terminal)
    assert result == code
    assert f"Run {story.run} is {'HELD' if code else 'DONE'} at step" in text


def test_without_a_terminal_each_news_is_one_line_once() -> None:
    _, text = watched(rough(), terminal=False)
    assert text.count("! hang_local: rank 1 on node0") == 1
    assert text.count("→ restarted the ranks (L2) without node1") == 1
    assert text.count("✓ recovered in 12.2 s, 5 steps again") == 1
    assert "\x1b" not in text


def test_news_come_in_the_order_they_happened() -> None:
    items = news(view_at(rough(), 1.0))
    assert [item.unix for item in items] == sorted(item.unix for item in items)
    assert len({item.key for item in items}) == len(items)


def test_the_picture_shows_ranks_and_incidents() -> None:
    console = Console(file=io.StringIO(), width=110, color_system=None)
    console.print(picture(view_at(rough(), 0.5)))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for expected in ("step ", "loss ", "tokens/s", "node2", "node_down"):
        assert expected in text, expected


def test_ctrl_c_leaves_the_run_going_and_says_so() -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    console = Console(file=io.StringIO(), force_terminal=False, width=200)
    view = view_at(rough(), 0.4)
    assert run(Path("/r/rough"), console=console, look=lambda _: view, sleep=interrupted) == 0
    assert isinstance(console.file, io.StringIO)
    assert "run rough goes on by itself" in console.file.getvalue()
    assert "pawl drain rough" in console.file.getvalue()


def test_in_a_pipe_each_line_is_whole_and_plain_even_where_colour_is_forced(tmp_path: Path) -> None:
    story = crash_loop()
    story.event("run_held", {"rule": "crash-loop", "reason": "word " * 60 + "end", "hint": "x"})
    run_dir = story.write(tmp_path)
    environ = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": "80", "TERM": "xterm"}
    command = [sys.executable, "-m", "orchestrator", "watch", str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=60)
    assert done.returncode == 3
    assert "\x1b" not in done.stdout
    assert done.stdout.splitlines()[-1].startswith("Run loop is HELD") and done.stdout.rstrip().endswith("end")
