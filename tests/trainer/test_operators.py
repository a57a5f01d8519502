"""Times of a trace, added up by operator: nothing is counted twice, and an accelerator's time is not the CPU's."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from trainer.operators import operators, table


def span(name: str, start: float, duration: float, *, cat: str = "cpu_op", tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": tid, "ts": start, "dur": duration}


def rows(*events: dict[str, Any]) -> list[tuple[str, int, float, float]]:
    return [(row.name, row.calls, row.own_us, row.whole_us) for row in operators(events)[0]]


def test_own_time_is_without_what_lies_inside() -> None:
    inner = (span("mm", 2, 3), span("mm", 6, 1), span("view", 3, 1))
    assert rows(span("step 4", 0, 10, cat="user_annotation"), *inner) == [
        ("step 4", 1, 6.0, 10.0), ("mm", 2, 3.0, 4.0), ("view", 1, 1.0, 1.0),
    ]  # fmt: skip


def test_threads_do_not_nest_into_each_other_and_neighbours_do_not_overlap() -> None:
    assert rows(span("a", 0, 10), span("b", 1, 9, tid=2), span("c", 10, 2)) == [
        ("a", 1, 10.0, 10.0), ("b", 1, 9.0, 9.0), ("c", 1, 2.0, 2.0),
    ]  # fmt: skip


def test_kernels_are_the_table_where_there_are_any() -> None:
    events = (span("aten::mm", 0, 50), span("gemm", 5, 20, cat="kernel"), span("copy", 8, 4, cat="gpu_memcpy", tid=2))
    assert rows(*events) == [("gemm", 1, 20.0, 20.0), ("copy", 1, 4.0, 4.0)]
    assert "time on the accelerator" in table("t", events) and "time on the CPU" in table("t", events[:1])


def test_other_events_are_passed_over() -> None:
    noise = (
        {"ph": "M", "name": "process_name"},
        span("frame", 0, 5, cat="python_function"),
        {"ph": "s", "cat": "ac2g"},
    )
    assert rows(*noise, span("mm", 1, 2)) == [("mm", 1, 2.0, 2.0)]
    assert rows() == []


def nested() -> st.SearchStrategy[list[Any]]:
    """A forest: every node a width for itself and its children."""
    leaf = st.tuples(st.sampled_from("abc"), st.integers(1, 9), st.just([]))
    return st.lists(
        st.recursive(
            leaf, lambda inner: st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.lists(inner, max_size=3))
        ),
        max_size=4,
    )


def laid_out(forest: list[Any], start: float) -> tuple[list[dict[str, Any]], float]:
    """The spans of a forest one after the other, each a little longer than its children; and where they end."""
    spans: list[dict[str, Any]] = []
    for name, own, children in forest:
        inside, end = laid_out(children, start + 0.5)
        stop = end + own + 0.5
        spans += [span(name, start, stop - start), *inside]
        start = stop
    return spans, start


@given(nested())
def test_own_times_sum_to_the_time_of_the_outermost_events(forest: list[Any]) -> None:
    spans, end = laid_out(forest, 0.0)
    found, _ = operators(reversed(spans))
    assert sum(row.own_us for row in found) == end
    assert sum(row.calls for row in found) == len(spans)


def test_the_table_shows_the_largest_and_says_what_it_leaves_out() -> None:
    text = table("rank 4, steps 3 to 4", [span("mm", 0, 3000), span("view", 3000, 1000)])
    assert text.splitlines()[0] == "rank 4, steps 3 to 4, time on the CPU"
    assert [line.split() for line in text.splitlines()[2:]] == [
        ["3.000", "75.0%", "3.000", "1", "mm"], ["1.000", "25.0%", "1.000", "1", "view"],
    ]  # fmt: skip
    many = table("t", [span(f"op{n}", 2 * n, 1) for n in range(50)])
    assert many.splitlines()[-1] == "and 10 more with 20.0% of the time"
