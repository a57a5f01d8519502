"""Records: one side writes, the schema accepts, the other side reads the same values."""

import json
import math
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from record_factory import CYCLE, line

from orchestrator.state import codec
from orchestrator.state import records as reader
from orchestrator.state import train_lines as lines_reader
from orchestrator.state.epochs import PLAIN_EPOCH
from orchestrator.state.epochs import Epoch as ReaderEpoch
from trainer import records as writer
from trainer.beat import Phase

SCHEMAS = Path(__file__).parents[2] / "configs" / "schema"
RECORDS = (
    *("launch_facts", "cycle", "outcome", "train_line", "validation", "index", "manifest"),
    *("intent", "claim", "nodes", "control", "ledger_line"),
)


def schema(name: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((SCHEMAS / f"{name}.schema.json").read_text())
    return body


def check(name: str, record: object) -> None:
    jsonschema.Draft202012Validator(schema(name)).validate(record)


@pytest.mark.parametrize("name", RECORDS)
def test_each_schema_is_one_and_demands_the_version(name: str) -> None:
    body = schema(name)
    jsonschema.Draft202012Validator.check_schema(body)
    assert "schema_version" in body["required"]
    with pytest.raises(jsonschema.ValidationError):
        check(name, {"schema_version": 2})


def test_cycle_from_supervisor_to_rank() -> None:
    written = reader.Cycle(
        run="demo",
        epoch=ReaderEpoch(3, 1, 2),
        nonce="n",
        resume_from="step-000000100.a0001g01c0002",
        skip_windows=((3, 5),),
        nodes=(
            reader.CycleNode(node_rank=0, name="node0", address="127.0.0.1"),
            reader.CycleNode(node_rank=1, name="node2", address="127.0.0.1"),
        ),
        ranks_per_node=2,
        world_size=4,
        master_addr="127.0.0.1",
        master_port=29500,
        beat_interval_s=1.0,
        created_unix=1.5,
    )
    body = json.loads(codec.dumps(written))
    check("cycle", body)
    read = writer.parse_cycle(body)
    assert (read.run, read.resume_from, read.skip_windows) == (written.run, written.resume_from, written.skip_windows)
    assert (read.world_size, read.ranks_per_node, read.num_nodes, read.beat_interval_s) == (4, 2, 2, 1.0)
    assert read.epoch.text == written.epoch.text


def test_a_first_cycle_resumes_from_nothing() -> None:
    check("cycle", {**CYCLE, "resume_from": None, "skip_windows": []})
    with pytest.raises(jsonschema.ValidationError):
        check("cycle", {**CYCLE, "resume_from": "latest"})


OUTCOME = writer.Outcome(
    rank=42,
    node="node1",
    epoch=writer.Epoch(attempt=3, generation=1, cycle=2),
    kind="crashed",
    exit_code=1,
    step=17,
    phase="STEP",
    message="ValueError: odd",
    exception=writer.ExceptionFacts(type="ValueError", message="odd", frame="x.py:3 in f"),
    checkpoint="step-000000016.a0003g01c0002",
    bad_file=None,
    written_unix=2.5,
)


@pytest.mark.parametrize("kind", [str(kind) for kind in reader.OutcomeKind])
def test_outcome_from_rank_to_supervisor(kind: str) -> None:
    text = writer.to_json(replace(OUTCOME, kind=kind, bad_file="checkpoints/x/rank-0.safetensors", suspects=(3, 7)))
    check("outcome", json.loads(text))
    read = reader.parse_outcome(text)
    assert isinstance(read, reader.Outcome), read
    assert (read.rank, read.node, read.kind, read.exit_code, read.step) == (42, "node1", kind, 1, 17)
    assert (read.phase, read.checkpoint, read.bad_file, read.suspects) == (
        "STEP",
        OUTCOME.checkpoint,
        "checkpoints/x/rank-0.safetensors",
        (3, 7),
    )
    assert read.epoch == ReaderEpoch(3, 1, 2)
    assert OUTCOME.exception is not None
    assert codec.encode(read.exception) == asdict(OUTCOME.exception)


def test_outcome_without_exception_and_outside_pawl() -> None:
    text = writer.to_json(replace(OUTCOME, exception=None, checkpoint=None, epoch=writer.UNSUPERVISED))
    check("outcome", json.loads(text))
    read = reader.parse_outcome(text)
    assert isinstance(read, reader.Outcome), read
    assert (read.exception, read.checkpoint, read.epoch) == (None, None, PLAIN_EPOCH)


def test_kinds_and_phases_are_the_schemas() -> None:
    outcome = schema("outcome")["properties"]
    assert set(outcome["kind"]["enum"]) == {str(kind) for kind in reader.OutcomeKind}
    assert outcome["phase"]["enum"] == [phase.name for phase in Phase]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss": float("nan"), "grad_norm": float("inf")},
        {"loss": None, "grad_norm": None, "skipped": "skip_window"},
        {"mfu": 0.4, "mfu_full_attn": 0.5, "mfu_megatron": 0.45, "hfu": 0.6, "save_s": 1.25},
    ],
)
def test_train_line_from_rank_0_to_the_views(changes: dict[str, Any]) -> None:
    written = line(loss=6.931471805599453, lr=0.1 + 0.2) if not changes else line(**changes)
    text = writer.to_json(written)
    check("train_line", json.loads(text))
    read = lines_reader.parse_train_step(text)
    assert isinstance(read, lines_reader.TrainStep), read
    assert read.nonfinite == ("nonfinite" in json.loads(text)) == (changes.get("loss") is not None)
    for field in fields(written):
        if not read.nonfinite or field.name not in changes:
            assert getattr(read, field.name) == getattr(written, field.name), field.name


def test_validation_line_from_rank_0_to_the_views() -> None:
    source = writer.SourceLoss(source="data/books", loss=1 / 3, num_valid=96, num_samples=3)
    empty = writer.SourceLoss(source="data/code", loss=math.nan, num_valid=0, num_samples=0)
    line = writer.ValidationLine(step=6, loss=1 / 3, num_valid=96, num_samples=3, sources=(source, empty), unix=1.0)
    text = writer.to_json(line)
    check("validation", json.loads(text))
    read = lines_reader.parse_validation_point(text)
    assert isinstance(read, lines_reader.ValidationPoint), read
    assert (read.step, read.loss, read.num_valid, read.num_samples) == (6, 1 / 3, 96, 3)
    assert [(each.source, each.loss, each.num_valid, each.num_samples) for each in read.sources] == [
        ("data/books", 1 / 3, 96, 3), ("data/code", None, 0, 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "record"),
    [
        (
            "intent",
            reader.Intent(attempt=1, nonce="n", launcher="local", by="a", created_unix=1.0, exclude=("n1",)),
        ),
        (
            "claim",
            reader.Claim(nonce="n", host="h", pid=1, start_ticks=5, boot_id="b", job_id=None, created_unix=1.0),
        ),
        (
            "nodes",
            reader.AttemptNodes(
                nodes=(reader.AttemptNode(name="node0", address="127.0.0.1", spare=False, agent_pid=4),)
            ),
        ),
        ("control", reader.Request(verb=reader.Verb("save-now"), by="ann", created_unix=1.0)),
    ],
)
def test_records_inside_the_orchestrator_follow_their_schema(name: str, record: object) -> None:
    body = json.loads(codec.dumps(record))
    check(name, body)
    assert reader.parse(type(record), json.dumps(body)) == record
    assert reader.parse(type(record), json.dumps({**body, "later": 1})) == record, "unknown fields are ignored"
    assert isinstance(reader.parse(type(record), json.dumps({**body, "schema_version": 2})), reader.Unreadable)


def test_ledger_lines_need_the_facts_of_their_kind() -> None:
    body = {"schema_version": 1, "epoch": [1, 1, 1], "seq": 3, "writer": "attempt-0001-g01", "unix": 1.0}
    check("ledger_line", {**body, "kind": "run_done", "data": {"step": 6}})
    for kind, data in (
        ("run_done", {}),
        ("no_such_kind", {}),
        ("attempt_ended", {"outcome": "?", "reason": "", "rule": ""}),
    ):
        with pytest.raises(jsonschema.ValidationError):
            check("ledger_line", {**body, "kind": kind, "data": data})
