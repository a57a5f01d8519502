"""A ledger line with any value replaced by any JSON: named as unreadable or understood, never a traceback later on."""

import io
import json
from dataclasses import asdict
from pathlib import Path

import orch_worlds as w
import pytest
import run_stories
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from orchestrator.decide.decide import decide_cycle, decide_run
from orchestrator.decide.observation import RunObservation
from orchestrator.decide.policy import Policy
from orchestrator.metrics.run import run_samples
from orchestrator.state import facts
from orchestrator.state.history import replay, with_unrecorded_checkpoints
from orchestrator.state.ledger import event_line, latest_epoch, parse_lines
from orchestrator.state.records import Event, Unreadable, parse_event
from orchestrator.views import explain, status, watch
from orchestrator.views.run_view import RunInputs, build_view, to_json

SCHEMA = Path(__file__).parents[2] / "configs" / "schema" / "ledger_line.schema.json"
# As they stand in a file: some of them no writer can even make.
WILD = (
    *("null", "true", "0", "-1", "1e308", "-1e308", "1e400", "1e-320", "NaN", "Infinity", "-Infinity"),
    *(
        str(2**63),
        str(-(2**64)),
        "9" * 400,
        "9" * 5000,
        '"\\ud800"',
        '"\\u0000\\u001b[2J"',
        '"\\u202e"',
        '""',
        "{}",
        "[]",
    ),
    *('"x"', '["x"]', "[[1]]", "[null]", '[{"name": 3}]', '{"name": ["x"]}', "[" * 40 + "]" * 40),
    *("[" * 900 + "]" * 900, "[" * 100_000 + "]" * 100_000, '"done"', '"held"', '"step-000000005.a0001g01c0001"'),
    *('"step-' + "9" * 5000 + '.a0001g01c0001"', '"a' + "9" * 5000 + 'g01c0001"', "[1, 1, 99999999999999999999]"),
)
MARK = "\u2603here\u2603"


def examples() -> list[dict[str, object]]:
    """Real lines of whole runs, and one of every kind with all the fields that readers use."""
    told = [json.loads(event_line(event)) for event in run_stories.rough().events]
    told += [json.loads(event_line(event)) for event in run_stories.crash_loop().events]
    full = {name: None for kind in facts.KINDS for name in facts._FIELDS[kind]}
    for number, kind in enumerate(facts.KINDS, start=1):
        data = {name: full[name] for name in facts._FIELDS[kind]} | {"note": {"of": ["a", 1.5]}}
        line = Event(epoch=w.EPOCH, seq=500 + number, writer="ctl-x", unix=w.NOW, kind=kind, data=data)
        told.append(json.loads(event_line(line)))
    return told


LINES = examples()


def places(value: object, at: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, item in items for place in places(item, (*at, key)))]


def replaced(line: object, at: tuple[object, ...], wild: str) -> str:
    """The text of the line with the value at this place written as `wild`."""
    copy = json.loads(json.dumps(line))
    if not at:
        return wild
    holder = copy
    for key in at[:-1]:
        holder = holder[key]
    holder[at[-1]] = MARK
    return json.dumps(copy, ensure_ascii=False).replace(f'"{MARK}"', wild)


def use(text: str) -> None:
    """Everything that reads a ledger."""
    view = parse_lines(text, name="ctl-x.jsonl")
    events = with_unrecorded_checkpoints(view.events, ())
    history = replay(events)
    decide_cycle(w.cycle(), history, Policy())
    decide_run(RunObservation(now_unix=w.NOW, launcher="local", train_steps=9, last=None), history, Policy())
    latest_epoch(events)
    for event in events:
        event_line(event)
    shown = build_view(RunInputs(now=w.NOW + 2e7, run_dir="/runs/x", events=events, problems=view.problems))
    screen = Console(file=io.StringIO(), width=100)
    screen.print(watch.picture(shown), watch.progress_line(shown), len(watch.news(shown)))
    text = status.render(shown, width=100) + status.render_list([shown]) + explain.text(shown)
    (text + json.dumps(to_json(shown), allow_nan=False, ensure_ascii=False)).encode()
    list(run_samples([shown]))


@pytest.mark.parametrize("wild", WILD, ids=lambda text: text[:20].encode("unicode_escape").decode())
def test_every_place_of_every_kind_survives(wild: str) -> None:
    """One value at all places of one line of each kind, all of them in one ledger."""
    lines = {str(line["kind"]): line for line in LINES}
    text = [replaced(line, at, wild) for line in lines.values() for at in places(line)]
    parsed = [parse_event(line) for line in text]
    assert all(item.why for item in parsed if isinstance(item, Unreadable))
    use("".join(f"{line}\n" for line in text))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_value_anywhere_in_a_whole_run_survives(data: st.DataObject) -> None:
    any_json = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=8,
    ).map(json.dumps)
    lines = [json.dumps(line) for line in LINES]
    for _ in range(data.draw(st.integers(1, 4))):
        number = data.draw(st.integers(0, len(LINES) - 1))
        at = data.draw(st.sampled_from(places(LINES[number])))
        lines[number] = replaced(LINES[number], at, data.draw(st.sampled_from(WILD) | any_json))
    use("".join(f"{line}\n" for line in lines))


def test_every_kind_of_the_schema_has_a_row_and_a_wrong_value_is_named() -> None:
    assert set(json.loads(SCHEMA.read_text())["properties"]["kind"]["enum"]) == set(facts.KINDS)
    line = next(line for line in LINES if line["kind"] == "attempt_ended")
    found = parse_event(replaced(line, ("data", "outcome"), '["lost"]'))
    assert found == Unreadable(why="data.outcome: expected a text, found ['lost']")
    problems = parse_lines(replaced(line, ("data", "attempt"), "1e308") + "\n", name="ctl-x.jsonl").problems
    assert problems == ("ctl-x.jsonl:1: data.attempt: expected an attempt number, found 1e+308",)


def test_what_is_written_today_is_read() -> None:
    assert [
        parse_event(json.dumps(line)) for line in LINES if isinstance(parse_event(json.dumps(line)), Unreadable)
    ] == []
    assert asdict(replay(run_stories.rough().events))
