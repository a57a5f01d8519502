"""The bytes between rank and agent: configs/schema/shm.json, trainer.beat and orchestrator.agent.shm say the same.

The layout file is read by a decoder that knows nothing of either package; what the trainer writes must decode to what
was written, by the layout file and by the orchestrator.
"""

import json
import math
import struct
import zlib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agent import shm as agent_side
from orchestrator.state.epochs import Epoch as AgentEpoch
from orchestrator.state.records import Unreadable
from trainer import beat as rank_side
from trainer.records import Epoch

SCHEMA = Path(__file__).parents[2] / "configs" / "schema"
LAYOUT: dict[str, Any] = json.loads((SCHEMA / "shm.json").read_text())
FORMATS = {"u32": "I", "u64": "Q", "f64": "d", "8s": "8s"}

BEAT = rank_side.Beat(
    attempt=3, generation=1, cycle=2, rank=42, pid=4711, phase=rank_side.Phase.SAVE, step=12500,
    beat_monotonic_ns=1_000_000_007, phase_since_ns=1_000_000_003, collective_seq=99, control_ack=5, loss=2.5,
    tokens=26_214_400_000, profile_ack=7,
)  # fmt: skip
GOLDEN_BEAT = (
    "02000000000000000300000001000000020000002a0000006712000005000000"
    "d43000000000000007ca9a3b0000000003ca9a3b000000006300000000000000"
    "050000000000000000000000000004400000801a060000000700000000000000"
    "00000000000000000000000000000000000000000000000000000000bab558c5"
)


def decode(raw: bytes, struct_name: str) -> dict[str, Any]:
    """The fields of a record by the layout file alone."""
    values: dict[str, Any] = {}
    for name, offset, kind in LAYOUT["structs"][struct_name]["fields"]:
        base, _, count = kind.partition("[")
        found = struct.unpack_from(f"<{count[:-1]}{FORMATS[base]}", raw, offset)
        values[name] = list(found) if count else found[0]
    return values


def example_stats() -> rank_side.Stats:
    """Every field another number, so that two swapped fields cannot pass."""
    stats = rank_side.Stats()
    for number, field in enumerate(fields(stats), start=1):
        if field.name != "step_seconds_histogram":
            setattr(stats, field.name, number + 0.5 if isinstance(getattr(stats, field.name), float) else number)
    stats.step_seconds_histogram = list(range(100, 100 + len(stats.step_seconds_histogram)))
    return stats


@pytest.fixture
def node(tmp_path: Path) -> agent_side.NodeMemory:
    return agent_side.NodeMemory.create(tmp_path / "shm", num_ranks=3, agent_lost_s=2.5)


def open_rank(node: agent_side.NodeMemory, local_rank: int) -> rank_side.BeatWriter:
    epoch = Epoch(attempt=3, generation=1, cycle=2)
    return rank_side.open_beats(node.path, epoch=epoch, rank=40 + local_rank, local_rank=local_rank)


def test_header_made_by_the_agent(node: agent_side.NodeMemory) -> None:
    raw = node.path.read_bytes()
    header = decode(raw, "header")
    assert header == {
        "magic": LAYOUT["magic"].encode(),
        "version": LAYOUT["version"],
        "num_ranks": 3,
        "rank_stride": LAYOUT["rank_stride"],
        "header_bytes": LAYOUT["header_bytes"],
        "agent_lost_ms": 2500,
        "control_seq": 0,
        "control_word": 0,
        "profile_seq": 0,
        "profile_steps": 0,
        "profile_ranks": 0,
    }
    assert len(raw) == LAYOUT["header_bytes"] + 3 * LAYOUT["rank_stride"]


def test_one_beat_byte_by_byte() -> None:
    assert (struct.pack("<Q", 2) + rank_side.encode_beat(BEAT)).hex() == GOLDEN_BEAT


def test_beat_by_layout_file_and_by_agent_is_what_the_rank_wrote() -> None:
    raw = struct.pack("<Q", 2) + rank_side.encode_beat(BEAT)
    assert len(raw) == LAYOUT["structs"]["beat"]["bytes"]
    by_file = decode(raw, "beat")
    for field in fields(BEAT):
        assert by_file[field.name] == getattr(BEAT, field.name), field.name
    seen = agent_side.parse_beat(raw)
    assert isinstance(seen, agent_side.Beat)
    for field in fields(BEAT):
        assert getattr(seen, field.name) == getattr(BEAT, field.name), field.name


def test_stats_by_layout_file_and_by_agent_are_what_the_rank_wrote() -> None:
    stats = example_stats()
    raw = struct.pack("<Q", 4) + rank_side.encode_stats(stats)
    assert len(raw) == LAYOUT["structs"]["stats"]["bytes"]
    by_file = decode(raw, "stats")
    seen = agent_side.parse_stats(raw)
    assert isinstance(seen, agent_side.Stats)
    for field in fields(stats):
        written = getattr(stats, field.name)
        assert by_file[field.name] == written, field.name
        if field.name != "step_seconds_histogram":
            assert getattr(seen, field.name) == written, field.name
    assert list(seen.step_buckets) == stats.step_seconds_histogram


@pytest.mark.parametrize("record", ["beat", "stats"])
def test_the_checksum_covers_what_the_layout_file_says(record: str) -> None:
    raw = struct.pack("<Q", 2) + (
        rank_side.encode_beat(BEAT) if record == "beat" else rank_side.encode_stats(example_stats())
    )
    crc = LAYOUT["structs"][record]["crc"]
    assert struct.unpack_from("<I", raw, crc["at"])[0] == zlib.crc32(raw[crc["from"] : crc["to"]])
    parse = agent_side.parse_beat if record == "beat" else agent_side.parse_stats
    for at in (crc["from"], crc["to"] - 1, crc["at"]):
        changed = bytearray(raw)
        changed[at] ^= 1
        assert isinstance(parse(bytes(changed)), Unreadable)
    assert isinstance(parse(struct.pack("<Q", 3) + raw[8:]), Unreadable), "odd: the writer is inside"


def test_through_the_file_each_rank_in_its_own_block(node: agent_side.NodeMemory) -> None:
    first, last = open_rank(node, 0), open_rank(node, 2)
    first.beat(rank_side.Phase.STEP, step=7)
    last.beat(rank_side.Phase.DATA, step=8)
    last.stats.observe_step_seconds(0.5)
    last.publish_stats()
    beats = [node.read_beat(local_rank) for local_rank in range(3)]
    assert isinstance(beats[1], Unreadable), "never written is not a beat of zeros"
    assert isinstance(beats[0], agent_side.Beat)
    assert isinstance(beats[2], agent_side.Beat)
    assert [(beat.rank, beat.step, beat.phase.name) for beat in (beats[0], beats[2])] == [
        (40, 7, "STEP"),
        (42, 8, "DATA"),
    ]
    assert beats[0].epoch == AgentEpoch(3, 1, 2)
    stats = node.read_stats(2)
    assert isinstance(stats, agent_side.Stats)
    assert (stats.step_seconds_sum, sum(stats.step_buckets)) == (0.5, 1)
    assert math.isnan(stats.checkpoint_load_seconds)


@pytest.mark.parametrize("word", ["SAVE", "DRAIN"])
def test_control_word_and_its_acknowledgement(node: agent_side.NodeMemory, word: str) -> None:
    rank = open_rank(node, 1)
    seq = node.write_control(agent_side.ControlWord[word])
    assert rank.control() == (seq, rank_side.Word[word])
    assert decode(node.path.read_bytes(), "header")["control_seq"] == seq
    rank.beat(control_ack=seq)
    seen = node.read_beat(1)
    assert isinstance(seen, agent_side.Beat)
    assert seen.control_ack == seq


def test_a_profile_order_and_its_acknowledgement_beside_the_control_word(node: agent_side.NodeMemory) -> None:
    word = node.write_control(agent_side.ControlWord.SAVE)
    node.write_profile(4, steps=3, local_ranks=[0, 2])
    header = decode(node.path.read_bytes(), "header")
    assert (header["profile_seq"], header["profile_steps"], header["profile_ranks"]) == (4, 3, 0b101)
    assert node.profile == (4, 3, 0b101)
    ranks = [open_rank(node, local_rank) for local_rank in range(3)]
    assert [rank.profile_request() for rank in ranks] == [(4, 3, True), (4, 3, False), (4, 3, True)]
    assert all(rank.control() == (word, rank_side.Word.SAVE) for rank in ranks), "neither hides the other"
    ranks[1].beat(profile_ack=4)
    seen = node.read_beat(1)
    assert isinstance(seen, agent_side.Beat)
    assert (seen.profile_ack, seen.control_ack) == (4, 0)


def test_phases_words_and_buckets_are_the_same_three_times() -> None:
    assert LAYOUT["phases"] == [phase.name for phase in rank_side.Phase] == [phase.name for phase in agent_side.Phase]
    assert [phase.value for phase in rank_side.Phase] == [phase.value for phase in agent_side.Phase] == list(range(8))
    words = {name.upper(): value for name, value in LAYOUT["control_words"].items()}
    assert words == {word.name: word.value for word in rank_side.Word}
    assert words == {word.name: word.value for word in agent_side.ControlWord}
    bounds = tuple(math.inf if bound is None else float(bound) for bound in LAYOUT["histogram_upper_bounds_s"])
    assert bounds == rank_side.HISTOGRAM_BOUNDS_S == agent_side.STEP_BUCKET_BOUNDS_S
