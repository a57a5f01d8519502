"""`python -m trainer schedule`: grid, figures, drawing, CSV and clear errors."""

import json
import re
from pathlib import Path

import pytest

from trainer.cli import main


def schedule(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["schedule", *words]) == 0
    return capsys.readouterr().out


def test_grid_and_figures_of_1f1b(capsys: pytest.CaptureFixture[str]) -> None:
    lines = schedule(capsys, "-p", "2", "-m", "3").splitlines()
    assert lines[0].split() == ["rank", "0", "F0", "F1", "·", "·", "B0", "B0", "F2", "B1", "B1", "·", "B2", "B2"]
    assert lines[1].split() == ["rank", "1", "·", "F0", "B0", "B0", "F1", "B1", "B1", "F2", "B2", "B2", "·", "·"]
    assert (
        "step 12 units, all ranks waiting for the gradient norm: bubble 33.3% of ideal time, 25.0% of total" in lines[5]
    )
    assert "most activations (F to I or B): 2 1 micro-batches" in lines[-1]


def test_zb_h1_shows_pending_weight_gradients_apart(capsys: pytest.CaptureFixture[str]) -> None:
    out = schedule(capsys, "--name", "zb-h1", "-p", "4", "-m", "16")
    assert "bubble 6.2% of ideal time, 5.9% of total time" in out
    assert (
        "most activations (F to I or B): 4 3 2 1" in out and "(I to W): 1 2 3 4" in out and "together: 4 4 4 4" in out
    )


def test_interleaved_names_stages_and_takes_fractions_of_costs(capsys: pytest.CaptureFixture[str]) -> None:
    out = schedule(capsys, "--name", "interleaved", "-p", "2", "-m", "2", "-v", "2", "--costs", "1,0.5,0.5")
    assert out.splitlines()[1].split()[:6] == ["rank", "1", "·", "·", "1F0", "1F0"]
    assert "costs F 1, I 0.5, W 0.5" in out and "most activations (F to I or B): 2 1.5 micro-batches" in out


def test_the_step_without_the_clipping_barrier_is_given_too(capsys: pytest.CaptureFixture[str]) -> None:
    out = schedule(capsys, "--name", "zb-v", "-p", "4", "-m", "16")
    assert "step 49.5 units, all ranks waiting for the gradient norm: bubble 3.1% of ideal time, 3.0% of total" in out
    assert "step 48 units without that barrier: bubble 0.0% of ideal time, 0.0% of total time" in out


def test_csv_can_be_read_back_and_sizes_must_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.csv"
    mine.write_text(schedule(capsys, "--name", "interleaved", "-p", "2", "-m", "3", "-v", "2", "--csv"))
    words = ("--file", str(mine), "-p", "2", "-m", "3", "-v", "2", "--csv")
    assert schedule(capsys, *words) == mine.read_text()
    assert main(["schedule", "--file", str(mine), "-m", "4"]) == 2
    assert "-m is 4, but" in capsys.readouterr().err


def test_the_drawing_is_one_page_with_every_action(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "grid.html"
    schedule(capsys, "--name", "interleaved", "-p", "2", "-m", "4", "-v", "2", "--html", str(page))
    text = page.read_text()
    found = re.search(r'<script type="application/json" id="figure">(.*?)</script>', text, re.DOTALL)
    assert found is not None and not re.search(r"<(?:script|link)[^>]+(?:src|href)=", text)
    traces = json.loads(found[1])["data"]
    assert sum(len(trace["y"]) for trace in traces) == 32
    assert [trace["name"] for trace in traces if trace["showlegend"]] == [
        "F forward", "B backward (input and weights)",
    ]  # fmt: skip
    assert "3B3: B backward (input and weights)<br>stage 3, micro-batch 3<br>rank 1, from" in found[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-p", "4"], "-p (ranks) and -m (micro-batches) are needed, or --file"),
        (["--name", "zb", "-p", "4", "-m", "4"], "unknown schedule 'zb'; known: 1f1b, afab, interleaved, zb-h1, zb-v"),
        (["--name", "zb-h1", "-p", "4", "-m", "4", "-v", "2"], "schedule zb-h1 is made for v = 1 stages a rank, not 2"),
        (["--file", "no such file"], "no such file cannot be read"),
        (["--file", "x", "--name", "1f1b"], "give one of them"),
    ],
)
def test_errors_are_one_paragraph(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", *words]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("trainer schedule: ") and said in shown and shown.count("\n") == 1


@pytest.mark.parametrize("costs", ["1,1", "1,a,1", "0,0,0", "1,-1,1", "nan,1,1", "1,inf,1"])
def test_costs_are_three_numbers(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["schedule", "-p", "2", "-m", "2", "--costs", costs])
    assert ended.value.code == 2 and "is not three costs" in capsys.readouterr().err


def test_a_deadlock_in_a_file_shows_the_grid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("0F0 0B0\n1B0 1F0\n")
    assert main(["schedule", "--file", str(mine)]) == 2
    shown = capsys.readouterr().err
    assert "deadlocks: rank 0 at 0B0 waits for 1B0" in shown and "rank 1: [1B0]   1F0" in shown


def test_a_drawing_and_a_csv_can_be_had_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "schedule.html"
    out = schedule(capsys, "-p", "2", "-m", "2", "--csv", "--html", str(page))
    assert out == schedule(capsys, "-p", "2", "-m", "2", "--csv") and "<html" in page.read_text()


def test_nothing_is_printed_where_the_drawing_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["schedule", "-p", "2", "-m", "2", "--html", str(tmp_path / "none" / "schedule.html")]) == 1
    said = capsys.readouterr()
    assert said.out == "" and "cannot be written" in said.err


@pytest.mark.parametrize(
    ("words", "says"),
    [(["--name", "nope"], "unknown schedule 'nope'"), (["-p", "5000", "-m", "20000"], "100,000,000 forward passes")],
)
def test_what_cannot_be_planned_is_said_at_once(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["schedule", *words]) == 2
    assert says in capsys.readouterr().err
