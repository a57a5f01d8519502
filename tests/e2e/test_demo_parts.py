"""The demo's pure parts: whom it hits, how far the run is, which agent it asks, and tables that fit 80 columns."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from ops.demo import faults, metrics, progress, run, summary


def cycle(*names: str) -> dict[str, Any]:
    """A cycle.json whose nodes are listed in another order than their ranks."""
    nodes = [{"name": name, "node_rank": rank} for rank, name in enumerate(names)]
    return {"nodes": nodes[::-1]}


def test_faults_hit_nodes_that_train_in_rank_order(tmp_path: Path) -> None:
    assert faults.in_rank_order(cycle("node2", "node0")) == ["node2", "node0"]
    assert faults.training_nodes(tmp_path) == []
    for number, names in {1: ("node0", "node1"), 2: ("node2", "node0")}.items():
        folder = tmp_path / "attempts" / "0001" / "cycles" / f"{number:04d}"
        folder.mkdir(parents=True)
        (folder / "cycle.json").write_text(json.dumps(cycle(*names)))
    assert faults.training_nodes(tmp_path) == ["node2", "node0"], "those of the newest cycle"


@pytest.mark.parametrize(
    ("texts", "step"),
    [
        ([], 0),
        ([""], 0),
        (['{"step": 7}\n'], 7),
        (['{"step": 7}\n{"step": 8}\n{"ste'], 8),
        (['{"step": 7}\n{"step": 8}'], 7),  # whole JSON, but its line is not ended yet
        (['{"step": 70}\n', '{"step": 61}\n'], 61),  # a later cycle repeats steps
        (['{"step": 70}\n', '{"st'], 70),
    ],
)
def test_the_newest_step_is_that_of_the_last_whole_line(texts: list[str], step: int) -> None:
    assert progress.newest_step(texts) == step


def test_recoveries_are_counted_over_all_writers(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "a.jsonl").write_text('{"kind": "recovered"}\n{"kind": "incident", "why": "recovered"}\n')
    (tmp_path / "ledger" / "b.jsonl").write_text('{"kind":"recovered"}\n{"kind": "recov')
    assert progress.recoveries(tmp_path) == 2


def page(rank: int, *, loss: bool) -> str:
    """What an agent serves whose node has this rank. Only rank 0 knows the loss."""
    lines = [
        f'pawl_train_phase{{node="n",phase="step",rank="{rank}",run="demo"}} 1.0',
        'pawl_train_step{node="n"} 70.0',
    ]
    return "\n".join([*lines, *(['pawl_train_loss{node="n",run="demo"} 5.25'] if loss else [])])


def test_the_agent_that_has_rank_0_is_asked_wherever_it_stands_in_the_list() -> None:
    urls = metrics.addresses('[{"targets": ["a:1", "b:2"]}, {"targets": ["c:3"]}]')
    assert urls == ["http://a:1/metrics", "http://b:2/metrics", "http://c:3/metrics"]
    spare, other, first = "", page(2, loss=False), page(0, loss=True)
    for pages in ([spare, other, first], [first, spare, other], [other, first, spare]):
        found = metrics.of_rank_0(dict(zip(urls, pages, strict=True)))
        assert found == urls[pages.index(first)]
    assert metrics.of_rank_0({"u": spare, "v": other, "w": page(0, loss=False)}) is None
    assert metrics.shown(first) == ['pawl_train_step{node="n"} 70.0', 'pawl_train_loss{node="n",run="demo"} 5.25']


def incident(kind: str, rank: int | None, **cost: float | None) -> dict[str, Any]:
    return {"failure_class": kind, "node": "node1", "rank": rank, "level": "L1", "cost": cost or None}


VIEW: dict[str, Any] = {
    "run": "demo",
    "state": "done",
    "progress": {"step": 210, "train_steps": 210, "tokens": 860_160, "loss": 4.5, "recomputed_steps": 21},
    "incidents": [
        incident("checkpoint_invalid", 1, detection_s=612.5, teardown_s=430.4, backoff_s=120.3, start_s=571.2,
                 load_s=120.8, total_s=1855.2, lost_steps=1234),
        incident("node_down", None, detection_s=0.6, teardown_s=None, total_s=None, lost_steps=None),
        incident("hang_local", 3),
    ],
    "goodput": {"wall_s": 200.0, "seconds": {"productive": 150.0, "recompute": 30.0, "unknown": 0.0, "queue": 20.0}},
}  # fmt: skip
SPENT = {"Text": 24.6, "The model, exported and compared": 11.2}


def printed(width: int, *parts: RenderableType) -> list[str]:
    console = Console(width=width, record=True, highlight=False)
    with console.capture() as capture:
        console.print(*parts, sep="\n")
    return [line.rstrip() for line in capture.get().splitlines()]


@pytest.mark.parametrize("width", [80, 120])
def test_the_closing_tables_fit_and_cut_nothing(width: int) -> None:
    lines = printed(width, summary.incidents(VIEW), summary.goodput(VIEW), summary.phases(SPENT))
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width and "…" not in text
    words = text.split()
    for word in ("what", "level", "lost", "steps", "detect", "stop", "wait", "start", "load", "total"):
        assert word in words, f"heading {word!r} is squeezed at {width} columns:\n{text}"
    for number in ("612.5", "430.4", "120.3", "571.2", "120.8", "1855.2", "1234"):
        assert number in words, f"{number} is squeezed at {width} columns:\n{text}"


def test_what_is_unknown_is_no_number() -> None:
    text = "\n".join(printed(120, summary.incidents(VIEW)))
    row = next(line for line in text.splitlines() if "node_down" in line)
    assert row.split()[-7:] == ["0.6", "?", "?", "?", "?", "?", "?"]


def test_shares_and_sums_add_up() -> None:
    lines = [line.split() for line in printed(80, summary.goodput(VIEW), summary.phases(SPENT)) if line]
    assert ["productive", "150.0", "75.0%"] in lines and ["sum", "200.0"] in lines
    assert not any(line[0] == "unknown" for line in lines), "a category without time is no row"
    assert ["sum", "36"] in lines


def test_every_part_of_the_demo_is_timed_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 13.0, 20.0])
    monkeypatch.setattr(run.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(run, "console", Console(quiet=True))
    phases = run.Phases()
    phases.begin("one", "")
    phases.begin("two", "")
    assert phases.seconds() == {"one": 3.0, "two": 7.0}
