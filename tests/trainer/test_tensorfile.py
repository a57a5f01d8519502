"""Safetensors files that lie: whatever a header says, opening the file is one clear ValueError and reads no more."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from trainer.checkpoint.tensorfile import TensorFile, write_tensors


def craft(path: Path, header: object, data: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def tensor(start: int, end: int, *, shape: object = None, dtype: object = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - start) // 4] if shape is None else shape, "data_offsets": [start, end]}


BAD: dict[str, tuple[object, str]] = {
    "overlap": ({"a": tensor(0, 8), "b": tensor(4, 12)}, "b overlaps a"),
    "same place": ({"a": tensor(0, 12), "b": tensor(0, 12)}, "overlaps"),
    "inside another": ({"a": tensor(0, 12), "b": tensor(4, 8)}, "b overlaps a"),
    "gap": ({"a": tensor(0, 4), "b": tensor(8, 12)}, "b leaves a gap after a"),
    "gap at the start": ({"a": tensor(4, 12)}, "a leaves a gap after the header"),
    "bytes of nobody": ({"a": tensor(0, 8)}, "4 bytes at its end belong to no tensor"),
    "outside": ({"a": tensor(0, 16)}, "a lies outside the file"),
    "far outside": ({"a": tensor(0, 4), "b": tensor(4, 2**63)}, "b lies outside the file"),
    "wrong size": ({"a": tensor(0, 12, shape=[4])}, r"tensor a \(12 bytes for F32 of shape \(4,\)\)"),
    "huge shape": ({"a": tensor(0, 12, shape=[2**62, 2**62])}, "12 bytes for F32"),
    "backwards": ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [12, 0]}}, "tensor a"),
    "negative offset": ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [-12, 0]}}, "no list of whole numbers"),
    "negative dim": ({"a": tensor(0, 12, shape=[-3])}, "no list of whole numbers"),
    "two negative dims": ({"a": tensor(0, 12, shape=[-3, -1])}, "no list of whole numbers"),
    "fractional dim": ({"a": tensor(0, 12, shape=[3.0])}, "no list of whole numbers"),
    "true as a dim": ({"a": tensor(0, 12, shape=[True, 3])}, "no list of whole numbers"),
    "text as shape": ({"a": tensor(0, 12, shape="3")}, "no list of whole numbers"),
    "unknown dtype": ({"a": tensor(0, 12, dtype="F8_E4M3")}, "dtype 'F8_E4M3' is none of"),
    "list as dtype": ({"a": tensor(0, 12, dtype=["F32"])}, "dtype .* is none of"),
    "three offsets": ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 4, 12]}}, "no list of whole numbers"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [3]}}, "data_offsets None"),
    "no object": ({"a": 3}, "it is no object"),
    "a list": ([1, 2], "not a JSON object"),
    "no JSON": (b"{", "Expecting"),
    "twice": (b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]},"a":{"dtype":"F32","shape":[0],'
              b'"data_offsets":[0,0]}}', "has a twice"),
    "deep": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    "no text": (b"\xff\xfe{}", "decode"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_header_that_lies_is_one_error_that_names_the_tensor(case: str, tmp_path: Path) -> None:
    header, said = BAD[case]
    with pytest.raises(ValueError, match=said):
        TensorFile(craft(tmp_path / "x.safetensors", header, bytes(12)))


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 2**40, 10**6, 300 << 20])
def test_a_huge_header_length_is_refused_before_anything_is_read(length: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="header length"):
        TensorFile(craft(tmp_path / "x.safetensors", {}, length=length))


@pytest.mark.parametrize("size", range(0, 8))
def test_a_file_of_a_few_bytes(size: int, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(size))
    with pytest.raises(ValueError, match="not a safetensors file"):
        TensorFile(tmp_path / "x")


def test_the_order_of_the_header_is_not_that_of_the_data(tmp_path: Path) -> None:
    data = np.arange(3, dtype="<f4").tobytes()
    file = TensorFile(craft(tmp_path / "x", {"b": tensor(4, 12), "a": tensor(0, 4)}, data))
    assert file.array("b").tolist() == [1, 2] and file.array("a").tolist() == [0]


@settings(max_examples=40, deadline=None)
@given(shapes=st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=5))
def test_files_go_both_ways_between_this_and_the_library(shapes: list[list[int]], tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("both")
    rng = np.random.default_rng(0)
    arrays = {f"t{i}": np.asarray(rng.normal(size=shape), "f4") for i, shape in enumerate(shapes)}
    save_file(arrays, folder / "library")
    theirs = TensorFile(folder / "library")
    write_tensors(folder / "ours", [(k, "F32", a.shape) for k, a in arrays.items()], arrays.values())
    ours = load_file(folder / "ours")
    assert set(theirs.entries) == set(arrays) == set(ours)
    for key, array in arrays.items():
        assert np.array_equal(theirs.array(key), array) and np.array_equal(ours[key], array)
