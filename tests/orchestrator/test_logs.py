"""`pawl logs`: merged over cycles and nodes, identical lines folded, one rank on request."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_factory import rough

from orchestrator.errors import PawlError
from orchestrator.state.rundir import RunPaths
from orchestrator.views.logs import LogLine, clean, fold, of_rank, read_lines, run, show


def lines_of(run_dir: Path, **options: object) -> list[str]:
    written: list[str] = []
    run(run_dir, write=written.append, **options)  # type: ignore[arg-type]
    return written


def test_all_nodes_of_all_cycles_with_repeats_folded(tmp_path: Path) -> None:
    run_dir = rough().write(tmp_path)
    RunPaths(run_dir).node_log(1, 2, "node0").write_text("[rank0] again\n\nlast without line feed")
    assert lines_of(run_dir) == [
        "a0001c0001 node0  [rank0] loading",
        "a0001c0001 node0  [rank0] step took long  ×3",
        "a0001c0001 node1  [rank2] loading",
        "a0001c0002 node0  [rank0] again",
        "a0001c0002 node0  last without line feed",
    ]


def test_one_rank(tmp_path: Path) -> None:
    assert lines_of(rough().write(tmp_path), rank=2) == ["a0001c0001 node1  [rank2] loading"]


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("[rank3] x", 3),
        ("[rank12]: x", 12),
        ("[default0]:x", 0),
        ("Rank 4 died", 4),
        ("rank=5 ok", 5),
        ("ranking 6", None),
        ("frank 7", None),
        ("none", None),
    ],
)
def test_the_rank_that_a_line_names(line: str, rank: int | None) -> None:
    assert of_rank(line) == rank


def test_control_sequences_never_reach_the_terminal() -> None:
    assert clean("a\x1b[31mred\x1b[0m\x07b\r\n") == "aredb"
    assert clean("10 %\r50 %\r100 %") == "100 %"
    assert len(clean("x" * 100_000)) == 8192


def test_no_output_is_one_clear_error(tmp_path: Path) -> None:
    story = rough()
    story.logs.clear()
    run_dir = story.write(tmp_path)
    with pytest.raises(PawlError, match="has no output yet"):
        lines_of(run_dir)
    with pytest.raises(PawlError, match="names rank 7"):
        lines_of(run_dir, rank=7)


def test_following_prints_what_arrives_and_ends_with_the_run(tmp_path: Path) -> None:
    run_dir = rough().write(tmp_path)
    log = RunPaths(run_dir).node_log(1, 3, "node0")
    looks = 0

    def is_over() -> bool:
        nonlocal looks
        looks += 1
        with log.open("a") as file:
            file.write(f"whole {looks}\nhal")
        return looks == 2

    written = lines_of(run_dir, follow=True, is_over=is_over)
    assert written[-3:] == ["a0001c0003 node0  whole 1", "a0001c0003 node0  halwhole 2", "a0001c0003 node0  hal"]


texts = st.lists(st.builds(LogLine, st.sampled_from(["n0", "n1"]), st.sampled_from("abc")), max_size=30)


@settings(max_examples=50, deadline=None)
@given(lines=texts)
def test_folding_loses_no_line(lines: list[LogLine]) -> None:
    folded = list(fold(lines))
    assert sum(line.times for line in folded) == len(lines)
    assert [line.text for line in folded for _ in range(line.times)] == [line.text for line in lines]
    assert all(a.text != b.text for a, b in pairwise(folded))


def test_a_line_of_several_nodes_says_so() -> None:
    (folded,) = fold([LogLine("a0001c0001 node0", "x"), LogLine("a0001c0001 node1", "x")])
    assert show(folded) == "a0001c0001 node0 +1  x  ×2"


def test_lines_can_be_read_lazily(tmp_path: Path) -> None:
    assert next(read_lines(rough().write(tmp_path))).text == "[rank0] loading"
