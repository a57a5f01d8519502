"""Records: every field is checked, unknown ones are ignored, other versions refused, nothing ever raises."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.state import records as r
from orchestrator.state.checkpoint_index import parse_index
from orchestrator.state.codec import dumps
from orchestrator.state.epochs import Epoch
from orchestrator.state.train_lines import ValidationPoint

CYCLE = r.Cycle(
    run="x",
    epoch=Epoch(3, 1, 2),
    nonce="n",
    resume_from="step-000000100.a0001g01c0001",
    skip_windows=((3, 5),),
    nodes=(r.CycleNode(node_rank=0, name="node0", address="127.0.0.1"),),
    ranks_per_node=2,
    world_size=2,
    master_addr="127.0.0.1",
    master_port=29500,
    beat_interval_s=1.0,
    created_unix=1.5,
)
OUTCOME = r.Outcome(
    rank=42,
    epoch=Epoch(1, 1, 1),
    kind=r.OutcomeKind.CRASHED,
    exit_code=1,
    step=None,
    phase="init",
    message="é",
    exception=r.ExceptionInfo(type="ValueError", message="x"),
    written_unix=2.0,
)
INTENT = r.Intent(attempt=1, nonce="n", launcher="local", by="me", created_unix=1.0, exclude=("a",))


def body(**more: Any) -> dict[str, Any]:
    return json.loads(dumps(CYCLE)) | more  # type: ignore[no-any-return]


@pytest.mark.parametrize("record", [CYCLE, OUTCOME, INTENT], ids=lambda record: type(record).__name__)
def test_a_record_comes_back_as_it_was(record: object) -> None:
    assert r.parse(type(record), dumps(record)) == record


def test_unknown_fields_are_ignored_and_absent_optional_ones_default() -> None:
    text = json.dumps({k: v for k, v in body(later="x").items() if k != "skip_windows"})
    cycle = r.parse_cycle(text)
    assert isinstance(cycle, r.Cycle) and cycle.skip_windows == ()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "no such file"),
        ("", "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "schema_version is None"),
        ('{"schema_version": true}', "schema_version is True"),
        (json.dumps(body(schema_version=2)), "version 2"),
        (json.dumps(body(run=3)), "cycle.run: expected str, found 3"),
        (json.dumps(body(world_size=2.0)), "cycle.world_size: expected int"),
        (json.dumps(body(world_size=True)), "cycle.world_size: expected int"),
        (json.dumps(body(nodes={})), "cycle.nodes: expected a list"),
        (json.dumps(body(nodes=[{"name": "a"}])), "cycle.nodes[0].node_rank: missing"),
        (json.dumps(body(epoch=[1, 2])), "epoch"),
        (json.dumps(body(epoch={"attempt": -1, "generation": 1, "cycle": 1})), "epoch"),
        (json.dumps(body(skip_windows=[[1]])), "expected 2 items"),
        (json.dumps(body()).replace("1.5", "NaN"), "not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_what_does_not_fit_is_unreadable_and_says_why(text: str | None, why: str) -> None:
    record = r.parse_cycle(text)
    assert isinstance(record, r.Unreadable) and why in record.why


def test_an_unknown_kind_lists_the_known_ones() -> None:
    record = r.parse_outcome(dumps(OUTCOME).replace("crashed", "exploded"))
    assert isinstance(record, r.Unreadable) and "exploded" in record.why and "drained" in record.why


def test_integers_are_taken_where_seconds_are_meant() -> None:
    cycle = r.parse_cycle(json.dumps(body(created_unix=7)))
    assert isinstance(cycle, r.Cycle) and cycle.created_unix == 7.0


def test_nan_is_never_written() -> None:
    with pytest.raises(ValueError, match="JSON"):
        dumps(ValidationPoint(step=1, loss=float("nan"), num_valid=1, num_samples=1, unix=1.0))


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(
    st.text(max_size=40) | _json.map(json.dumps), st.dictionaries(st.sampled_from(sorted(body())), _json, max_size=4)
)
def test_nothing_makes_a_parser_raise(text: str, changes: dict[str, Any]) -> None:
    for parse in (r.parse_cycle, r.parse_outcome, r.parse_manifest, r.parse_event, r.parse_claim, parse_index):
        parse(text)
    assert isinstance(r.parse_cycle(json.dumps(body(**changes))), r.Cycle | r.Unreadable)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 200), st.integers(0, 10**6))
def test_an_epoch_is_its_text(attempt: int, generation: int, cycle: int) -> None:
    epoch = Epoch(attempt, generation, cycle)
    assert Epoch.parse(epoch.text) == epoch
    assert Epoch.from_json(epoch.to_list()) == epoch


@pytest.mark.parametrize("text", ["", "a1g1c1", "a00003g01c0002", "a0003g01c0002\n", "A0003g01c0002", "a٠٠٠٣g01c0002"])
def test_other_spellings_are_no_epoch(text: str) -> None:
    assert Epoch.parse(text) is None


@pytest.mark.parametrize(
    "change",
    [{"unix": 1e300}, {"unix": -1.0}, {"writer": "\ud800"}, {"data": {"message": "\ud800"}}, {"data": {"\ud800": 1}}],
    ids=["after the calendar", "before 1970", "half a character", "half a character inside", "as a key"],
)
def test_a_ledger_line_that_no_page_could_show_is_unreadable(change: dict[str, object]) -> None:
    line = {"schema_version": 1, "epoch": [1, 1, 1], "seq": 1, "writer": "w", "unix": 1.0}
    line |= {"kind": "run_done", "data": {}}
    assert not isinstance(r.parse_event(json.dumps(line)), r.Unreadable)
    assert isinstance(r.parse_event(json.dumps({**line, **change})), r.Unreadable)
