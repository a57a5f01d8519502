"""attempts/N/beats/<node>: one record of 4 KiB per node, written in place every ten seconds.

It is the floor under the channel: whoever can read the run directory can see, without talking to anybody, which nodes
were alive and where their ranks stood. In place, because ten thousand ranks must not cost the file system's metadata
server anything; a torn record fails its CRC and is Unreadable.

    0 magic "PAWLNODE" · 8 u32 version · 12 u32 length · 16 u64 seq · 24 u32 crc32 of the JSON · 28 JSON · zeros to 4096
"""

import json
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from orchestrator.state.codec import decode, dumps
from orchestrator.state.epochs import Epoch
from orchestrator.state.fsio import open_plain
from orchestrator.state.records import SCHEMA_VERSION, Unreadable

RECORD_BYTES = 4096
_MAGIC = b"PAWLNODE"
_HEAD = struct.Struct("<8sIIQI")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a rank stood; None before its first beat."""

    rank: int
    pid: int | None
    phase: str | None
    step: int | None
    quiet_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """What an agent knew at `unix`. `seq` grows by one with each record."""

    schema_version: int = SCHEMA_VERSION
    seq: int
    node: str
    host: str
    agent_pid: int
    epoch: Epoch
    unix: float
    running: bool
    ranks: tuple[RankPlace, ...]
    ranks_left_out: int = 0


def encode_record(record: NodeRecord) -> bytes:
    """The 4096 bytes; ranks that do not fit are left out and counted."""
    ranks = record.ranks
    while True:
        kept = NodeRecord(
            seq=record.seq,
            node=record.node,
            host=record.host,
            agent_pid=record.agent_pid,
            epoch=record.epoch,
            unix=record.unix,
            running=record.running,
            ranks=ranks,
            ranks_left_out=len(record.ranks) - len(ranks),
        )
        text = dumps(kept).encode()
        if len(text) <= RECORD_BYTES - _HEAD.size:
            head = _HEAD.pack(_MAGIC, SCHEMA_VERSION, len(text), record.seq, zlib.crc32(text))
            return (head + text).ljust(RECORD_BYTES, b"\0")
        ranks = ranks[:-1]


def parse_record(raw: bytes) -> NodeRecord | Unreadable:
    """The record, or why not: short, foreign, of another version, or torn."""
    if len(raw) < _HEAD.size:
        return Unreadable(why=f"{len(raw)} bytes are no node record")
    magic, version, length, _, crc = _HEAD.unpack_from(raw)
    if magic != _MAGIC or version != SCHEMA_VERSION:
        return Unreadable(why="not a node record of this version")
    text = raw[_HEAD.size : _HEAD.size + length]
    if len(text) != length or zlib.crc32(text) != crc:
        return Unreadable(why="wrong checksum (being written?)")
    try:
        return decode(NodeRecord, json.loads(text), where="node record")
    except (ValueError, TypeError, RecursionError) as error:
        return Unreadable(why=str(error))


def write_record(path: Path, record: NodeRecord) -> None:
    """Overwrite the node's record in place. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o640)
    try:
        os.pwrite(fd, encode_record(record), 0)
    finally:
        os.close(fd)


def read_record(path: Path) -> NodeRecord | Unreadable:
    """The node's last record. Unreadable also when there is none."""
    try:
        with open_plain(path) as file:
            return parse_record(file.read(RECORD_BYTES))
    except OSError as error:
        return Unreadable(why=str(error.strerror))
