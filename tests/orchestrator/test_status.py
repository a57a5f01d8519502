"""`pawl status`: a table for the fleet, a page for one run; plain text where there is no terminal."""

from dataclasses import replace

import pytest
from run_factory import Story
from run_stories import clean, crash_loop, rough

from orchestrator.views import human
from orchestrator.views.records import RunState, RunView
from orchestrator.views.run_view import RunInputs, build_view
from orchestrator.views.status import render, render_list


def views() -> list[RunView]:
    stories = (clean(), rough(), crash_loop())
    return [
        build_view(RunInputs(now=s.now, run_dir=f"/r/{s.run}", events=tuple(s.events), lines=s.step_lines()))
        for s in stories
    ]


def test_the_fleet_has_a_line_for_each_run() -> None:
    lines = render_list(views(), width=120, colour=False).split("\n")
    assert len(lines) == 4
    assert lines[0].split()[:3] == ["run", "state", "step"]
    states = {line.split()[0]: line.split()[1] for line in lines[1:]}
    assert states == {"clean": "DONE", "rough": "DONE", "loop": "HELD"}


def test_one_run_in_full() -> None:
    text = render(views()[1], width=140, colour=False)
    for expected in ("60 / ", "hang_local", "rank 1 on node0", "12.2 s", "excluded", "productive 26.2 s", "not now"):
        assert expected in text, expected
    assert "\x1b" not in text


def test_colour_only_where_asked() -> None:
    assert "\x1b[" in render_list(views(), width=120, colour=True)
    assert "\x1b" not in render_list(views(), width=120, colour=False)


def test_names_are_text_not_console_markup() -> None:
    view = replace(views()[0], run="[red]x[/red]", metrics_addresses=("127.0.0.1:9400",))
    text = render(view, width=120, colour=False)
    assert "[red]x[/red]" in text
    assert "http://127.0.0.1:9400/metrics" in text
    assert "[red]x[/red]" in render_list([view], width=120, colour=False)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (None, "—"),
        (0.421, "0.42 s"),
        (7.06, "7.1 s"),
        (59.96, "1 min 00 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 05 min"),
        (356_400, "4 d 3 h"),
        (-5, "-5.0 s"),
    ],
)
def test_durations_as_people_say_them(seconds: float | None, said: str) -> None:
    assert human.duration(seconds) == said


@pytest.mark.parametrize(
    ("value", "said"), [(None, "—"), (950, "950"), (4096, "4,096"), (1_336_832, "1.34 M"), (12.6e9, "12.6 G")]
)
def test_counts(value: float | None, said: str) -> None:
    assert human.count(value) == said


def test_sizes_ratios_and_rates() -> None:
    assert (human.size(640), human.size(16_000_000), human.size(None)) == ("640 B", "16.0 MB", "—")
    assert (human.ratio(0.413), human.ratio(None)) == ("41.3 %", "—")
    assert human.rate(8192) == "8,192 tokens/s"
    assert (human.plural(1, "step"), human.plural(3, "step")) == ("1 step", "3 steps")


def test_before_the_first_step_no_goodput_is_shown() -> None:
    story = Story()
    story.create()
    story.attempt()
    story.cycle(run_first_step=False)
    story.wait(5.0)
    view = build_view(RunInputs(now=story.now, run_dir="runs/demo", events=tuple(story.events)))
    assert view.state is RunState.STARTING and view.goodput.productive_ratio is None
    page = render(view, width=120, colour=False)
    assert "goodput —" in page and "provisional" not in page and "shown from the first step on" in page
