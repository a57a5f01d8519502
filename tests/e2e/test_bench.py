"""`make bench` writes build/bench.json with the fields its readers take, and says which rows not to trust."""

import gc
import json
import os
from pathlib import Path

import pytest

from ops.bench import bench

FIELDS = ["id", "what", "ours", "other", "ratio", "spread", "shape", "threads"]


def row(name: str, spread: float) -> bench.Row:
    return bench.Row(id=name, what="w", ours=2.0, other=1.0, ratio=2.0, spread=spread, shape="s", threads=1)


def test_the_file_has_the_named_fields_and_a_wide_spread_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = {"calm": lambda: row("calm", 0.2), "wild": lambda: row("wild", 0.21)}
    monkeypatch.setattr(bench, "rows", lambda pairs: made)
    out = tmp_path / "build" / "bench.json"
    assert bench.main(["--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert list(written) == ["rows"] and [list(one) for one in written["rows"]] == [FIELDS] * 2
    said = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "SPREAD over 20%" in said["wild"] and "SPREAD" not in said["calm"]


def test_a_median_needs_five_pairs_that_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--pairs", "4"])
    order: list[str] = []
    monkeypatch.setattr(bench, "ours_step", lambda threads: lambda: order.append("ours"))
    monkeypatch.setattr(bench, "plain_step", lambda threads: lambda: order.append("plain"))
    assert bench.single_vs_plain(5).id == "single-vs-plain"
    assert order == ["ours", "plain"] * ((1 + 5) * bench.TURNS), "a warm-up as long as a pair, then five pairs"


def test_a_side_of_a_pair_is_its_fastest_turn_and_the_spread_is_over_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    calm, hit = [1.0, 2.0] * bench.TURNS, [9.0, 2.0, 1.0, 8.0, 1.0, 2.0]  # another process took two turns
    turns = iter([*calm, *hit, *calm, *calm, *[1.0, 3.0] * bench.TURNS])
    monkeypatch.setattr(bench, "timed", lambda function: next(turns))
    monkeypatch.setattr(bench, "ours_step", lambda threads: lambda: None)
    monkeypatch.setattr(bench, "plain_step", lambda threads: lambda: None)
    row = bench.single_vs_plain(5)
    assert (row.ratio, row.spread) == (2.0, 0.5), "ratios 2 2 2 2 3"


def test_short_commands_get_more_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [bench.turns_for(seconds) for seconds in (60.0, 0.4, 0.2, 0.001)] == [3, 3, 5, 10]
    taken: list[float] = []
    monkeypatch.setattr(bench, "timed", lambda function: taken.append(0.2) or 0.2)
    row = bench.command_row("r", ["python", "-m", "nothing"], 0.4, 5)
    assert (row.ratio, row.spread, len(taken)) == (0.5, 0.0, 1 + 5 * 5)


def test_what_is_timed_has_one_core_and_no_garbage_collection_and_gives_both_back() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(ZeroDivisionError), bench.steady():
        assert len(os.sched_getaffinity(0)) == 1 and not gc.isenabled()
        1 / 0  # noqa: B018
    assert os.sched_getaffinity(0) == before and gc.isenabled()


def test_make_bench_writes_where_it_says_and_has_the_three_rows() -> None:
    makefile = (bench.ROOT / "Makefile").read_text()
    assert "-m ops.bench.bench\n" in makefile and "build/bench.json" in makefile
    assert list(bench.rows(5)) == ["single-vs-plain", "pawl-help-s", "pawl-check-s"]
