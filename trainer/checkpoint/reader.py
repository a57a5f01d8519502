"""Open a checkpoint and read any box of any tensor from it. No torch; only JSON and safetensors are ever read.

Opening reads the two tables (manifest.json, index.json) and checks them against each other. `check_file` compares one
data file with its size and digest. Whatever is wrong becomes CheckpointInvalid with the file named; nothing in a
checkpoint is executed, so a pickle in place of a file is just a file that does not parse.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.checkpoint.boxes import Box, assert_exact_cover, intersect, shift, whole
from trainer.checkpoint.index import Index, parse_index
from trainer.checkpoint.manifest import FileRecord, Manifest, parse_manifest
from trainer.checkpoint.naming import INDEX, MANIFEST, box_key
from trainer.checkpoint.tensorfile import TensorFile
from trainer.data.format import file_xxh3
from trainer.errors import CheckpointInvalid
from trainer.fsio import RecordUnreadable, read_json

REMEDY = "This checkpoint must not be used; resume from the one before."


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose tables were read and agree."""

    path: Path
    manifest: Manifest
    index: Index


def invalid(path: Path, why: str) -> CheckpointInvalid:
    return CheckpointInvalid(f"{path}: {why}. {REMEDY}", bad_file=path)


def open_checkpoint(path: Path) -> Checkpoint:
    """Read and cross-check the tables. Raises CheckpointInvalid naming the file. Tensor data is not looked at."""
    if not path.is_dir():
        raise CheckpointInvalid(f"{path} is not a directory on this machine; no checkpoint is there.", bad_file=path)
    manifest = _parsed(path / MANIFEST, parse_manifest)
    record = manifest.file(INDEX)
    if record is None:
        raise invalid(path / MANIFEST, f"it does not list {INDEX}")
    check_file(path, record)
    index = _parsed(path / INDEX, parse_index)
    missing = [name for name in index.files() if manifest.file(name) is None]
    if missing:
        raise invalid(path / MANIFEST, f"it does not list {missing[0]}, which {INDEX} refers to")
    if index.step != manifest.step or manifest.state.step != manifest.step:
        raise invalid(path / INDEX, f"it is of step {index.step}, the manifest of step {manifest.step}")
    return Checkpoint(path=path, manifest=manifest, index=index)


def _parsed(path: Path, parse: Any) -> Any:
    try:
        return parse(read_json(path))
    except RecordUnreadable as error:
        raise CheckpointInvalid(f"{error} {REMEDY}", bad_file=path) from error
    except ValueError as error:
        raise invalid(path, str(error)) from error


def check_file(folder: Path, record: FileRecord) -> None:
    """Compare one file with its record. Raises CheckpointInvalid if it is missing, cut, or any byte differs."""
    path = folder / record.name
    if "/" in record.name or not path.is_file():
        raise invalid(path, "the file is missing")
    size = path.stat().st_size
    if size != record.bytes:
        raise invalid(path, f"it has {size:,} bytes, {record.bytes:,} were written")
    try:
        digest = file_xxh3(path)
    except OSError as error:
        raise invalid(path, f"it cannot be read ({error.strerror})") from error
    if digest != record.xxh3:
        raise invalid(path, f"its content changed: xxh3 {digest}, written {record.xxh3}")


class BoxReader:
    """Boxes of canonical tensors out of a checkpoint, through memory maps."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._files: dict[str, TensorFile] = {}

    def parts(self, name: str, state: str, wanted: Box) -> Iterator[tuple[Box, NDArray[Any]]]:
        """(box relative to `wanted`, its values) pairs that tile `wanted` exactly; the values are views of the file.

        Raises CheckpointInvalid if the checkpoint does not hold all of it.
        """
        found = []
        for saved in self.checkpoint.index.tensors[name].boxes:
            shared = intersect(wanted, saved.box)
            if shared is not None:
                found.append((shared, saved))
        try:
            assert_exact_cover(wanted, (shared for shared, _ in found))
        except ValueError as error:
            raise invalid(self.checkpoint.path / INDEX, f"tensor {name}: {error}") from error
        for shared, saved in found:
            values = self._array(saved.file, box_key(state, name, saved.box.offset), saved.box)
            inside = shift(shared, [-o for o in saved.box.offset])
            yield shift(shared, [-o for o in wanted.offset]), values[cells(inside)]

    def tensor(self, name: str, state: str = "master") -> NDArray[Any]:
        """A whole canonical tensor: the map itself where one box holds it, else assembled in memory."""
        entry = self.checkpoint.index.tensors[name]
        out: NDArray[Any] | None = None
        for part, values in self.parts(name, state, whole(entry.shape)):
            if len(entry.boxes) == 1:
                return values
            out = np.empty(entry.shape, values.dtype) if out is None else out
            out[cells(part)] = values
        assert out is not None
        return out

    def _array(self, file: str, key: str, box: Box) -> NDArray[Any]:
        path = self.checkpoint.path / file
        try:
            if file not in self._files:
                self._files[file] = TensorFile(path)
            array = self._files[file].array(key)
        except (OSError, ValueError) as error:
            raise invalid(path, str(error)) from error
        except KeyError as error:
            raise invalid(path, f"it does not hold {key}, which {INDEX} promises") from error
        if array.shape != box.size:
            raise invalid(path, f"{key} has shape {array.shape}, {INDEX} says {box.size}")
        return array


def cells(box: Box) -> tuple[slice, ...]:
    """The box as an index expression."""
    return tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))
