"""The report: one file, nothing from outside, nothing of a run becomes markup, long runs keep their extremes."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from run_factory import Story
from run_stories import clean, crash_loop, rough

from orchestrator.errors import PawlError
from orchestrator.state.epochs import Epoch
from orchestrator.state.train_lines import StepLine
from orchestrator.views.report import MAX_POINTS, redacted, thin, write_report


class Page(HTMLParser):
    """Tags, visible text and the embedded data of a report."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.urls: list[str] = []
        self.words: list[str] = []
        self.data = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._inside = "data" if ("id", "data") in attrs else tag
        self.urls += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        if self._inside == "data":
            self.data += data
        elif self._inside not in ("script", "style"):
            self.words.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    @property
    def text(self) -> str:
        return " ".join(self.words)


def page_of(story: Story, tmp_path: Path) -> Page:
    return Page(write_report(story.write(tmp_path), now=story.now).read_text())


def test_the_report_shows_the_run(tmp_path: Path) -> None:
    page = page_of(rough(), tmp_path)
    for expected in ("rough", "DONE", "60 of 60", "node_down", "hang_local", "12.2 s", "swap-node", "8 steps", "246 k"):
        assert expected in page.text, expected
    assert "Model FLOPs utilisation (MFU) is unknown here" in page.text
    assert "The parts sum to the wall time" in page.text


def test_it_needs_nothing_from_outside(tmp_path: Path) -> None:
    page = page_of(clean(), tmp_path)
    assert page.urls == []
    assert "link" not in page.tags
    style = (Path(__file__).parents[2] / "orchestrator" / "views" / "report_page" / "page.css").read_text()
    assert "url(" not in style
    assert "prefers-color-scheme: dark" in style


def test_nothing_of_a_run_becomes_markup(tmp_path: Path) -> None:
    story = crash_loop()
    story.run = "loop"
    evil = '</script><script>alert(1)</script><img src="http://evil/x.png">'
    for event in story.events:
        for key in ("message", "reason", "hint", "node"):
            if key in event.data:
                event.data[key] = evil
    page = page_of(story, tmp_path)
    assert page.tags.count("script") == 3
    assert "img" not in page.tags
    assert evil in page.text
    assert json.loads(page.data)["incidents"]


def test_the_data_is_complete_and_has_no_gap_filled(tmp_path: Path) -> None:
    data = json.loads(page_of(rough(), tmp_path).data)
    assert data["kept"]["step"] == list(range(1, 61))
    assert [part["step"] for part in data["recomputed"]] == [[21, 22, 23], [41, 42, 43, 44, 45]]
    assert len(data["spells"]) == 3
    assert len(data["incidents"]) == 2
    assert len(data["checkpoints"]) == 6
    assert data["kept"]["mfu"] == [None] * 60


def test_known_mfu_has_its_chart_and_three_numbers(tmp_path: Path) -> None:
    story = clean()
    for line in story.lines:
        line.update(mfu=0.41, mfu_full_attn=0.45, mfu_megatron=0.46)
    page = page_of(story, tmp_path)
    assert "41.0 % (exact causal pairs), 45.0 % (full attention), 46.0 % (Megatron's)" in page.text
    assert json.loads(page.data)["kept"]["mfu"][0] == pytest.approx(41.0)


def test_gradient_norms_by_block_are_a_map_where_there_are_any(tmp_path: Path) -> None:
    story = clean()
    page = page_of(story, tmp_path / "without")
    assert "Gradient norm of each block" not in page.text and json.loads(page.data)["grad_norms"]["step"] == []
    for line in story.lines[1::2]:
        line.update(grad_norms={"model.layers.0": 0.5, "<b>": 2.0 * line["step"], "odd": None})
    page = page_of(story, tmp_path / "with")
    found = json.loads(page.data)["grad_norms"]
    assert "Gradient norm of each block" in page.text
    steps = [line["step"] for line in story.lines[1::2]]
    assert (found["step"], found["block"]) == (steps, ["model.layers.0", "&lt;b&gt;", "odd"])
    assert found["norm"] == [[0.5] * len(steps), [2.0 * step for step in steps], [None] * len(steps)]


def test_an_empty_run_has_a_report(tmp_path: Path) -> None:
    story = Story(run="empty")
    page = page_of(story, tmp_path)
    assert "UNKNOWN" in page.text
    assert "Incidents None." in re.sub(r"\s+", " ", page.text)


def test_secrets_of_an_edited_config_are_not_shown(tmp_path: Path) -> None:
    """X6: the frozen config has none; a hand-edited one might."""
    story = clean()
    run_dir = story.write(tmp_path)
    config = (
        "slurm:\n  env:\n    WANDB_API_KEY: abc123\n    HF_TOKEN: 'tok-9'\n    THREADS: 4\nmodel:\n  bos_token_id: 7\n"
    )
    (run_dir / "run.yaml").write_text(config)
    text = write_report(run_dir, now=story.now).read_text()
    assert "abc123" not in text
    assert "tok-9" not in text
    assert "THREADS: 4" in redacted(config)
    assert "bos_token_id: 7" in redacted(config)
    assert redacted(config).count("***") == 2
    assert "abc" not in redacted("slurm:\n  env: {API_KEY: abc}\n")
    assert redacted("env:\nmodel:\n  token: 1") == "env:\nmodel:\n  token: 1"


def test_thinning_keeps_a_spike_of_one_step_in_a_million() -> None:
    epoch = Epoch(1, 1, 1)
    lines = [StepLine(step=i, epoch=epoch, unix=float(i), loss=3.0) for i in range(100_000)]
    lines[54_321] = StepLine(step=54_321, epoch=epoch, unix=54_321.0, loss=99.0)
    kept = thin(lines, MAX_POINTS)
    assert len(kept) <= MAX_POINTS + 4
    assert max(line.loss or 0.0 for line in kept) == 99.0
    assert (kept[0].step, kept[-1].step) == (0, 99_999)
    assert [line.step for line in kept] == sorted({line.step for line in kept})


def test_a_place_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    run_dir = clean().write(tmp_path)
    with pytest.raises(PawlError, match="--out FILE"):
        write_report(run_dir, tmp_path / "missing" / "report.html")
