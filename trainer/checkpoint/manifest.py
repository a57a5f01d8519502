"""manifest.json: what makes a directory a checkpoint. It is written last, and lists every other file with its digest.

It also carries its own digest (`xxh3`, over the other fields), so that a changed digit in the run state is found like a
changed byte in a weight.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from trainer.checkpoint.state import RunState

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A file of the checkpoint. xxh3: XXH3-128 of its bytes in hex."""

    name: str
    bytes: int
    xxh3: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """model_config: the architecture in Hugging Face's words, `dtype` = compute dtype, and two factors of the forward
    pass (`attention_scale` on q·k, `output_multiplier` on what enters the head). tokenizer: {path, sha256}.
    """

    run: str
    step: int
    epoch: str
    state: RunState
    model_config: Mapping[str, Any]
    tokenizer: Mapping[str, Any] | None
    files: tuple[FileRecord, ...]
    pawl_version: str
    torch_version: str
    created_unix: float

    @property
    def total_bytes(self) -> int:
        """Bytes of all listed files."""
        return sum(file.bytes for file in self.files)

    def file(self, name: str) -> FileRecord | None:
        return next((file for file in self.files if file.name == name), None)

    def to_json(self) -> dict[str, Any]:
        record = {
            "schema_version": SCHEMA_VERSION,
            "run": self.run,
            "step": self.step,
            "epoch": self.epoch,
            "state": self.state.to_json(),
            "model_config": dict(self.model_config),
            "tokenizer": None if self.tokenizer is None else dict(self.tokenizer),
            "files": [asdict(file) for file in self.files],
            "total_bytes": self.total_bytes,
            "pawl_version": self.pawl_version,
            "torch_version": self.torch_version,
            "created_unix": self.created_unix,
        }
        return {**record, "xxh3": _digest(record)}


def parse_manifest(record: Mapping[str, Any]) -> Manifest:
    """Read manifest.json's object. Raises ValueError where it is not one, of another version, or changed."""
    if record.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"schema_version is {record.get('schema_version')!r}, this program reads {SCHEMA_VERSION}")
    if record.get("xxh3") != _digest({key: value for key, value in record.items() if key != "xxh3"}):
        raise ValueError("its fields do not match its own xxh3 digest: it was changed or damaged")
    try:
        return Manifest(
            run=record["run"],
            step=int(record["step"]),
            epoch=record["epoch"],
            state=RunState.from_json(record["state"]),
            model_config=dict(record["model_config"]),
            tokenizer=record["tokenizer"],
            files=tuple(FileRecord(name=f["name"], bytes=int(f["bytes"]), xxh3=f["xxh3"]) for f in record["files"]),
            pawl_version=record["pawl_version"],
            torch_version=record["torch_version"],
            created_unix=float(record["created_unix"]),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"a field is missing or of another type ({error!r})") from error


def _digest(record: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(record, sort_keys=True, separators=(",", ":")).encode())
