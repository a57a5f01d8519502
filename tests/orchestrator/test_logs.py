"""`pawl logs`: merged over cycles and nodes, identical lines folded, one rank on request."""

from itertools import count, groupby
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_stories import rough

from orchestrator.errors import PawlError, UsageError
from orchestrator.state.rundir import RunPaths
from orchestrator.views.logs import WINDOW, LogLine, fold, of_rank, parse_line, ranges, read_lines, run, show


def lines_of(run_dir: Path, **options: object) -> list[str]:
    written: list[str] = []
    run(run_dir, write=written.append, **options)  # type: ignore[arg-type]
    return written


def test_all_ranks_of_all_cycles_with_repeats_folded(tmp_path: Path) -> None:
    run_dir = rough().write(tmp_path)
    RunPaths(run_dir).node_log(1, 2, "node0").write_text("[rank0]: again\n\nlast without line feed")
    assert lines_of(run_dir) == [
        "a0001c0001 node0 +1 ranks 0,2  loading  ×2",
        "a0001c0001 node0 rank 0  step took long  ×3",
        "a0001c0002 node0 rank 0  again",
        "a0001c0002 node0  last without line feed",
    ]


def test_ranks_that_write_the_same_in_turn_are_one_line_each(tmp_path: Path) -> None:
    run_dir = rough().write(tmp_path)
    text = "".join(f"[rank{rank}]: {word}\n" for rank in (0, 1) for word in "aba") + "[rank1]: b\n[rank0]: c\n"
    RunPaths(run_dir).node_log(1, 3, "node0").write_text(text)
    shown = [line.removeprefix("a0001c0003 node0 ") for line in lines_of(run_dir) if "c0003" in line]
    assert shown == ["ranks 0-1  a  ×2", "ranks 0-1  b  ×2", "ranks 0-1  a  ×2", "rank 1  b", "rank 0  c"]


def test_one_rank(tmp_path: Path) -> None:
    run_dir = rough().write(tmp_path)
    assert lines_of(run_dir, rank=2) == ["a0001c0001 node1 rank 2  loading"]
    RunPaths(run_dir).node_log(1, 3, "node0").write_text("[rank2]: rank 1 is slow\nrank 2 was killed\nrank 1 too\n")
    assert [line for line in lines_of(run_dir, rank=2) if "c0003" in line] == [
        "a0001c0003 node0 rank 2  rank 1 is slow",
        "a0001c0003 node0  rank 2 was killed",
    ]


def test_a_rank_that_the_run_does_not_have_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="4 ranks, numbered from 0"):
        lines_of(rough().write(tmp_path), rank=4)


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
    def text(raw: str) -> str:
        return parse_line(raw, cycle="c", node="n").text

    assert text("a\x1b[31mred\x1b[0m\x07b\r\n") == "ared b"
    assert text("10 %\r50 %\r100 %") == "100 %"
    assert len(text("x" * 100_000)) == 8192


def test_no_output_is_one_clear_error(tmp_path: Path) -> None:
    story = rough()
    story.logs.clear()
    run_dir = story.write(tmp_path)
    with pytest.raises(PawlError, match="has no output yet"):
        lines_of(run_dir)
    with pytest.raises(PawlError, match="of rank 3"):
        lines_of(run_dir, rank=3)


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


texts = st.lists(
    st.builds(LogLine, st.just("c"), st.just("n"), st.sampled_from([0, 1, None]), st.sampled_from("abc")), max_size=30
)


@settings(max_examples=100, deadline=None)
@given(lines=texts)
def test_folding_loses_no_line_and_keeps_the_order_of_each_rank(lines: list[LogLine]) -> None:
    folded = list(fold(lines))
    assert sum(line.times for line in folded) == len(lines)
    for rank in (0, 1):
        own = [key for key, _ in groupby(line.text for line in lines if line.rank == rank)]
        seen = iter([line.text for line in folded if rank in line.ranks])
        assert all(text in seen for text in own), "the words of a rank in its own order"


def test_folding_is_lazy_and_looks_only_so_far_back() -> None:
    lines = (LogLine("c", "n", 0, str(number)) for number in count())
    assert next(fold(lines)).text == "0"
    far = [LogLine("c", "n", 0, str(number)) for number in range(3 * WINDOW)]
    folded = list(fold([*far, *(LogLine("c", "n", 1, line.text) for line in far)]))
    assert len(folded) == 2 * len(far)


def test_a_line_of_several_nodes_says_so() -> None:
    (folded,) = fold([LogLine("a0001c0001", f"node{n}", None, "x") for n in (0, 1)])
    assert show(folded) == "a0001c0001 node0 +1  x  ×2"


def test_cycles_are_never_mixed() -> None:
    assert len(list(fold([LogLine(f"a0001c000{n}", "node0", 0, "x") for n in (1, 2)]))) == 2


def test_ranges_of_ranks() -> None:
    assert ranges([5, 0, 1, 2, 7, 8]) == "0-2,5,7-8"


def test_lines_can_be_read_lazily(tmp_path: Path) -> None:
    assert next(read_lines(rough().write(tmp_path))).text == "loading"
