"""index.json of a checkpoint: which rectangle of which canonical tensor lies in which file.

Only `pawl ckpt` and people read it on this side; choosing a checkpoint needs its manifest alone.
"""

from dataclasses import dataclass

from orchestrator.state.records import SCHEMA_VERSION, Unreadable, parse


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshInfo:
    """The layout that wrote a checkpoint."""

    dp: int
    pp: int
    tp: int
    cp: int
    zero_stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxEntry:
    """A rectangle of a canonical tensor and the file that holds it."""

    file: str
    offset: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A canonical tensor: its full shape, the states kept for it, the boxes that cover it."""

    shape: tuple[int, ...]
    states: dict[str, str]
    boxes: tuple[BoxEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """index.json of a checkpoint."""

    schema_version: int = SCHEMA_VERSION
    step: int
    mesh: MeshInfo
    tensors: dict[str, TensorEntry]


def parse_index(text: str | None) -> Index | Unreadable:
    return parse(Index, text)
