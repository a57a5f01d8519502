"""`make bench` writes build/bench.json with the fields its readers take, and says which rows not to trust."""

import gc
import json
import os
from pathlib import Path

import pytest
import torch.distributed as dist

from ops.bench import bench, clock, commands, loop, memory, pipeline, rows, single
from ops.bench.clock import Span
from ops.bench.models import bench_config
from ops.bench.rows import Row
from ops.bench.world import WorldError, in_world
from trainer.activations import CPU
from trainer.config import load
from trainer.memory import RankMemory, memory_of_ranks

FIELDS = ["id", "what", "ours", "other", "ratio", "spread", "shape", "threads"]


def row(name: str, spread: float) -> Row:
    return Row(id=name, what="w", ours=2.0, other=1.0, ratio=2.0, spread=spread, shape="s", threads=1)


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
    monkeypatch.setattr(single, "ours_step", lambda: lambda: order.append("ours"))
    monkeypatch.setattr(single, "plain_step", lambda: lambda: order.append("plain"))
    assert single.single_vs_plain(5).id == "single-vs-plain"
    assert order == ["ours", "plain"] * ((1 + 5) * rows.TURNS), "a warm-up as long as a pair, then five pairs"


def test_a_side_of_a_pair_is_its_fastest_turn_and_the_spread_is_over_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    calm, hit = [1.0, 2.0] * rows.TURNS, [9.0, 2.0, 1.0, 8.0, 1.0, 2.0]  # another process took two turns
    turns = iter([*calm, *hit, *calm, *calm, *[1.0, 3.0] * rows.TURNS])
    monkeypatch.setattr(rows, "timed", lambda function: next(turns))
    monkeypatch.setattr(single, "ours_step", lambda: lambda: None)
    monkeypatch.setattr(single, "plain_step", lambda: lambda: None)
    made = single.single_vs_plain(5)
    assert (made.ratio, made.spread) == (2.0, 0.5), "ratios 2 2 2 2 3"


def test_short_commands_get_more_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [rows.turns_for(seconds) for seconds in (60.0, 0.4, 0.2, 0.001)] == [3, 3, 5, 10]
    taken: list[float] = []
    for module in (rows, commands):
        monkeypatch.setattr(module, "timed", lambda function: taken.append(0.2) or 0.2)
    made = commands.command_row("r", ["python", "-m", "nothing"], 0.4, 5)
    assert (made.ratio, made.spread, len(taken)) == (0.5, 0.0, 1 + 5 * 5)


def test_what_is_timed_has_one_core_and_no_garbage_collection_and_gives_both_back() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(ZeroDivisionError), rows.steady():
        assert len(os.sched_getaffinity(0)) == 1 and not gc.isenabled()
        1 / 0  # noqa: B018
    assert os.sched_getaffinity(0) == before and gc.isenabled()


def test_make_bench_writes_where_it_says_and_has_its_rows() -> None:
    makefile = (rows.ROOT / "Makefile").read_text()
    assert "-m ops.bench.bench\n" in makefile and "build/bench.json" in makefile
    assert list(bench.rows(5)) == [
        "single-vs-plain", "loop-overhead", "memory-vs-predicted", "ce-32k-memory-vs-plain", "ce-32k-time-vs-plain",
        "bubble-pp2-m8", "overlap-dp2", "ckpt-blocking-vs-copy", "ckpt-write-vs-dd", "pawl-help-s", "pawl-check-s",
    ]  # fmt: skip


def predicted(total: int) -> RankMemory:
    return RankMemory(
        pp_rank=0, stages=(0,), parameters=total, gradients=0, optimizer=0, activations=0, logits=0, scratch=0
    )


def test_memory_is_judged_by_what_is_beyond_four_mebibytes(monkeypatch: pytest.MonkeyPatch) -> None:
    mib = 1 << 20
    close, above, below = (
        memory.Compared(layout="l", rank=0, measured=size * mib, predicted=predicted(100 * mib))
        for size in (104, 114, 86)
    )
    assert [one.ratio for one in (close, above, below)] == [1.0, 1.1, 1.1]
    monkeypatch.setattr(memory, "compare", lambda: [close, above])
    assert memory.memory_row().ratio == 1.1
    tiny = memory.Compared(layout="l", rank=0, measured=63 * mib, predicted=predicted(63 * mib))
    monkeypatch.setattr(memory, "compare", lambda: [close, tiny])
    with pytest.raises(ValueError, match="peaks below 64 MiB"):
        memory.memory_row()


def test_every_layout_of_the_memory_row_is_large_enough_and_one_of_a_kind() -> None:
    """As predicted, which is what the row itself compares with."""
    assert len(memory.LAYOUTS) >= 10 and all(layout.world_size <= 4 for layout in memory.LAYOUTS)
    configs = [bench_config(**layout.keys) for layout in memory.LAYOUTS]
    assert len({repr(config) for config in configs}) == len(configs)
    for config in configs:
        totals = [memory_of.total for memory_of in memory_of_ranks(config, kernels=CPU)]
        assert min(totals) > memory.SMALLEST_PEAK + memory.TOLERANCE_BYTES


def test_a_wait_inside_a_forward_is_idle_time() -> None:
    """Two ranks in a step of 10 s: 8 s of work on one, 5 on the other, whose forward waits a second."""
    first = [Span("_forward", 0.0, 3.0), Span("_backward", 4.0, 9.0), Span("_run", 0.0, 9.5)]
    waiting = [
        Span("wait", 3.0, 4.0),
        Span("_forward", 3.0, 6.0),
        Span("_backward", 7.0, 10.0),
        Span("_run", 0.5, 10.0),
    ]
    assert pipeline.idle_share([first, waiting]) == pytest.approx(1 - (8 + 5) / 2 / 10)
    assert pipeline.simulated_share([first, first]) == pytest.approx(1 / 9), "(p − 1)/(m + p − 1)"


def test_methods_are_clocked_while_the_block_runs() -> None:
    class Worker:
        def work(self, n: int) -> int:
            return 1 // n

    with clock.clocked((Worker, "work")) as spans, pytest.raises(ZeroDivisionError):
        Worker().work(1)
        Worker().work(0)
    Worker().work(1)
    assert [span.name for span in spans] == ["work", "work"] and spans[0].end <= spans[1].start


def test_the_training_of_the_loop_row_is_a_config_that_holds(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(loop.config_text(tmp_path))
    loaded = load(file)
    assert loaded.config is not None, loaded.problems
    assert loaded.config.checkpoints.checkpoint_interval > loaded.config.tokens.train_steps


def test_a_world_gives_results_in_rank_order_or_the_traceback() -> None:
    assert in_world(2, dist.get_rank) == [0, 1]
    with pytest.raises(WorldError, match=r"(?s)rank 0: .*ValueError: invalid literal.*rank 1: "):
        in_world(2, int, "x")
