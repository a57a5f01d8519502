"""index.json: which file holds which box of which canonical tensor.

Every rank can compute the whole index from the specs and the mesh, because layout and ownership are pure functions;
no metadata is gathered. A reader needs the index alone: how the writer's buckets lay is of no interest to it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from trainer.checkpoint.boxes import Box, assert_exact_cover, whole
from trainer.checkpoint.naming import rank_file
from trainer.checkpoint.plan import owned_boxes
from trainer.mesh.topology import Topology
from trainer.optim.layout import STATES, Layout
from trainer.spec import ParamSpec

SCHEMA_VERSION = 1

TORCH_NAMES: Mapping[str, str] = MappingProxyType({"float32": "F32", "float64": "F64"})
"""Dtypes of saved states by torch's name (without 'torch.')."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBox:
    """A box of a tensor and the file that holds it."""

    file: str
    box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """One canonical tensor. states: state name → safetensors dtype."""

    shape: tuple[int, ...]
    states: Mapping[str, str]
    boxes: tuple[SavedBox, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """The table of contents of a checkpoint. mesh: {dp, pp, tp, cp, zero_stage} of its writer, for people."""

    step: int
    mesh: Mapping[str, int]
    tensors: Mapping[str, SavedTensor]

    def files(self) -> tuple[str, ...]:
        return tuple(sorted({saved.file for tensor in self.tensors.values() for saved in tensor.boxes}))

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "step": self.step,
            "mesh": dict(self.mesh),
            "tensors": {name: _tensor_json(tensor) for name, tensor in self.tensors.items()},
        }


def build_index(
    specs: Sequence[ParamSpec],
    topology: Topology,
    *,
    layout_of: Callable[[int], Layout],
    zero_stage: int,
    step: int,
    dtype: str,
) -> Index:
    """The index of what all ranks write. layout_of: the layout of any rank. dtype: of every state, 'F32' or 'F64'."""
    boxes: dict[str, list[SavedBox]] = {spec.name: [] for spec in specs}
    for rank in range(topology.world_size):
        for piece in owned_boxes(specs, layout_of(rank), topology, rank, zero_stage):
            boxes[piece.name].append(SavedBox(file=rank_file(rank), box=piece.box))
    tensors = {
        spec.name: SavedTensor(
            shape=spec.shape, states=dict.fromkeys(STATES, dtype), boxes=tuple(_in_order(boxes[spec.name]))
        )
        for spec in specs
    }
    mesh = {"dp": topology.dp, "pp": topology.pp, "tp": topology.tp, "cp": topology.cp, "zero_stage": zero_stage}
    return Index(step=step, mesh=mesh, tensors=tensors)


def parse_index(record: Mapping[str, Any]) -> Index:
    """Read index.json's object. Raises ValueError where it is not one, or where boxes do not tile their tensor."""
    if record.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"schema_version is {record.get('schema_version')!r}, this program reads {SCHEMA_VERSION}")
    try:
        tensors = {name: _tensor(value) for name, value in record["tensors"].items()}
        index = Index(step=int(record["step"]), mesh=dict(record["mesh"]), tensors=tensors)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a field is missing or of another type ({error!r})") from error
    for name, tensor in index.tensors.items():
        try:
            assert_exact_cover(whole(tensor.shape), (saved.box for saved in tensor.boxes))
        except ValueError as error:
            raise ValueError(f"tensor {name}: {error}") from error
    return index


def _tensor(value: Mapping[str, Any]) -> SavedTensor:
    boxes = tuple(
        SavedBox(file=str(box["file"]), box=Box(tuple(map(int, box["offset"])), tuple(map(int, box["size"]))))
        for box in value["boxes"]
    )
    shape = tuple(map(int, value["shape"]))
    for saved in boxes:
        # A path here would let a crafted index read files outside of its folder.
        if "/" in saved.file or saved.file.startswith("."):
            raise ValueError(f"{saved.file!r} is not a plain file name")
        if not len(saved.box.offset) == len(saved.box.size) == len(shape):
            raise ValueError(f"a box of {saved.file} has another number of dims than its tensor")
    return SavedTensor(shape=shape, states=dict(value["states"]), boxes=boxes)


def _tensor_json(tensor: SavedTensor) -> dict[str, Any]:
    boxes = [
        {"file": saved.file, "offset": list(saved.box.offset), "size": list(saved.box.size)} for saved in tensor.boxes
    ]
    return {"shape": list(tensor.shape), "states": dict(tensor.states), "boxes": boxes}


def _in_order(boxes: Sequence[SavedBox]) -> list[SavedBox]:
    return sorted(boxes, key=lambda saved: (saved.box.offset, saved.file))
