"""Safetensors files, written as a stream and read in place.

The format: an 8-byte little-endian header length, a JSON header {key: {dtype, shape, data_offsets}}, then the raw
bytes. The safetensors library writes a dict of whole arrays, copied once more on the way; a rank's optimizer state may
be half of its memory, so it is streamed here tensor by tensor, and digested in the same pass. Files written here are
ordinary safetensors files, and reading never executes anything.
"""

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

ITEM_BYTES: Mapping[str, int] = MappingProxyType({"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8})
# numpy has no bfloat16; its bits travel as uint16.
_NUMPY: Mapping[str, str] = MappingProxyType({"F64": "<f8", "F32": "<f4", "BF16": "<u2", "F16": "<f2", "I64": "<i8"})
MAX_HEADER_BYTES = 256 << 20
# Digested and written piece by piece: the second of the two finds it in the cache.
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a file. start: absolute byte offset of its data."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A finished file: its size and the XXH3-128 of its bytes, in hex."""

    num_bytes: int
    xxh3: str


def encode_header(
    entries: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Header for tensors (key, dtype, shape) stored in this order, padded to 8 bytes so that data is aligned."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for key, dtype, shape in entries:
        end = at + math.prod(shape) * ITEM_BYTES[dtype]
        assert key not in header, f"tensor {key} twice in one file"
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_tensors(
    path: Path,
    entries: Sequence[tuple[str, str, tuple[int, ...]]],
    arrays: Iterable[NDArray[Any]],
    *,
    metadata: Mapping[str, str] | None = None,
    beside_sync: Callable[[], None] = lambda: None,
) -> Written:
    """Write one array per entry, in order, and sync the file. `arrays` may be a generator: one is alive at a time.

    beside_sync: called when all is written, while the disk is waited for.

    Raises FileExistsError if `path` exists, OSError where the disk does not take it.
    """
    digest = xxhash.xxh3_128()
    header = encode_header(entries, metadata)
    total = len(header)
    with path.open("xb") as file:
        file.write(header)
        digest.update(header)
        for (key, dtype, shape), array in zip(entries, arrays, strict=True):
            assert array.shape == shape and array.dtype == np.dtype(_NUMPY[dtype]), f"{key}: {array.dtype}{array.shape}"
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            for start in range(0, len(data), CHUNK_BYTES):
                chunk = data[start : start + CHUNK_BYTES]
                digest.update(chunk)
                file.write(chunk)
            total += len(data)
        file.flush()
        with ThreadPoolExecutor(1, thread_name_prefix="sync") as thread:
            synced = thread.submit(os.fsync, file.fileno())
            beside_sync()
            synced.result()
    return Written(num_bytes=total, xxh3=digest.hexdigest())


class TensorFile:
    """A safetensors file, mapped. Raises ValueError where the file is not one, is cut, or lies about a tensor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            if not 0 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise ValueError(f"not a safetensors file: {size:,} bytes with a header length of {length:,}")
            header = _parse(file.read(length))
        self.entries = {entry.key: entry for entry in _entries(header, base=8 + length, size=size)}

    def array(self, key: str) -> NDArray[Any]:
        """One tensor, mapped read-only; bfloat16 as its uint16 bits. KeyError: the file does not hold it."""
        entry = self.entries[key]
        if entry.num_bytes == 0:
            return np.empty(entry.shape, _NUMPY[entry.dtype])
        # One map per tensor, not per file: its pages leave the process with the array, so that reading a whole
        # checkpoint never holds more than the tensors in use.
        return np.memmap(self.path, dtype=_NUMPY[entry.dtype], mode="r", offset=entry.start, shape=entry.shape)


def _parse(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text.decode(), object_pairs_hook=_without_repeats)
    except RecursionError as error:
        raise ValueError("its header is nested too deeply") from error
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    return header


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """json keeps the last of two equal keys; which tensor is meant then is anybody's guess."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"its header has {key} twice")
        found[key] = value
    return found


def _entries(header: Mapping[str, Any], *, base: int, size: int) -> tuple[TensorEntry, ...]:
    """The tensors in the order of their data, which they cover exactly once. Raises ValueError naming the tensor."""
    spans = sorted((_span(key, value) for key, value in header.items() if key != "__metadata__"), key=lambda s: s[:2])
    at, before = 0, "the header"
    for start, end, entry in spans:
        if base + end > size:
            raise ValueError(f"tensor {entry.key} lies outside the file's {size:,} bytes: the file is cut or damaged")
        if start != at:
            what = "overlaps" if start < at else "leaves a gap after"
            raise ValueError(f"tensor {entry.key} {what} {before}: the file is damaged")
        at, before = end, entry.key
    if base + at != size:
        raise ValueError(f"{size - base - at:,} bytes at its end belong to no tensor: the file is damaged")
    return tuple(replace(entry, start=base + start) for start, _, entry in spans)


def _span(key: str, value: Any) -> tuple[int, int, TensorEntry]:
    """(first byte, end, entry) of one tensor, counted from the end of the header."""
    wrong = f"its header does not describe tensor {key}"
    if not isinstance(value, dict):
        raise ValueError(f"{wrong} (it is no object)")
    dtype: Any
    shape: Any
    offsets: Any
    dtype, shape, offsets = (value.get(name) for name in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"{wrong} (dtype {dtype!r} is none of {', '.join(ITEM_BYTES)})")
    if not (_are_whole_numbers(shape) and _are_whole_numbers(offsets) and len(offsets) == 2):
        raise ValueError(f"{wrong} (shape {shape!r} or data_offsets {offsets!r} is no list of whole numbers)")
    start, end = offsets
    entry = TensorEntry(key=key, dtype=dtype, shape=tuple(shape), start=start)
    if end - start != entry.num_bytes:
        raise ValueError(f"{wrong} ({end - start:,} bytes for {dtype} of shape {entry.shape})")
    return start, end, entry


def _are_whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)
