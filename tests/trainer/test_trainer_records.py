"""The trainer's records: what is read is checked, what is written survives a round trip bit for bit."""

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record_factory import CYCLE, line

from trainer.fsio import RecordUnreadable
from trainer.records import Epoch, parse_cycle, to_json


def test_epoch_text_round_trip_and_order() -> None:
    epoch = Epoch(attempt=3, generation=1, cycle=12)
    assert epoch.text == "a0003g01c0012"
    assert Epoch.parse(epoch.text) == epoch
    assert Epoch.parse("a12345g01c0001") > Epoch.parse("a9999g99c9999")
    with pytest.raises(ValueError, match="no epoch"):
        Epoch.parse("a3g1c2")


def test_cycle_is_read_and_unknown_fields_are_ignored() -> None:
    cycle = parse_cycle({**CYCLE, "later": {"field": 1}})
    assert cycle.epoch == Epoch(attempt=1, generation=2, cycle=3)
    assert (cycle.world_size, cycle.num_nodes, cycle.ranks_per_node) == (2, 1, 2)
    assert cycle.skip_windows == ((3, 5),)
    assert parse_cycle({**CYCLE, "resume_from": None}).resume_from is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"schema_version": 2}, "schema_version 2"),
        ({"world_size": "2"}, "world_size is '2'"),
        ({"world_size": True}, "world_size is True"),
        ({"resume_from": "../../etc"}, "no checkpoint name"),
        ({"resume_from": 100}, "no checkpoint name"),
        ({"skip_windows": [[5, 3]]}, "skip window"),
        ({"skip_windows": [[0, 3]]}, "skip window"),
        ({"skip_windows": [3]}, "skip window"),
        ({"epoch": {"attempt": 1, "generation": 1}}, "cycle is None"),
        ({"epoch": "a0001g01c0001"}, "epoch is"),
    ],
)
def test_a_wrong_cycle_is_refused_by_field(change: dict[str, Any], why: str) -> None:
    with pytest.raises(RecordUnreadable, match=why):
        parse_cycle({**CYCLE, **change})


@given(loss=st.floats(allow_nan=False, allow_infinity=False), lr=st.floats(min_value=0, max_value=1))
@settings(max_examples=50, deadline=None)
def test_floats_come_back_bit_equal(loss: float, lr: float) -> None:
    read = json.loads(to_json(line(loss=loss, lr=lr)))
    assert (read["loss"].hex(), read["lr"].hex()) == (loss.hex(), lr.hex())
    assert "nonfinite" not in read


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_null_and_said(value: float) -> None:
    text = to_json(line(loss=value))
    read = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert read["loss"] is None
    assert read["nonfinite"] is True
    assert read["grad_norm"] == 1.0
