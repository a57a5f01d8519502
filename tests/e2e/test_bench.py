"""`make bench` writes build/bench.json with the fields its readers take, and says which rows not to trust."""

import json
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
    assert order[-10:] == ["ours", "plain"] * 5


def test_make_bench_writes_where_it_says_and_has_the_three_rows() -> None:
    makefile = (bench.ROOT / "Makefile").read_text()
    assert "-m ops.bench.bench\n" in makefile and "build/bench.json" in makefile
    assert list(bench.rows(5)) == ["single-vs-plain", "pawl-help-s", "pawl-check-s"]
