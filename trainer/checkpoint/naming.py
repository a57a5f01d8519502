"""Names of checkpoints and of what is in them: one place that writes them, one that reads them.

    checkpoints/.step-000012500.a0003g01c0002.partial/    being written
    checkpoints/step-000012500.a0003g01c0002/             complete: manifest.json was written last, then the rename

A name carries the epoch (attempt, generation, cycle) of its writer, so two writers never share one, and a rename never
replaces anything.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

INDEX = "index.json"
MANIFEST = "manifest.json"
CONFIG = "config.yaml"

_EPOCH = re.compile(r"a(\d{4,})g(\d{2,})c(\d{4,})")
_NAME = re.compile(r"step-(\d{9,})\.(a\d{4,}g\d{2,}c\d{4,})")


@dataclass(frozen=True, slots=True, order=True)
class CheckpointName:
    """Step (completed updates) and writer of a checkpoint; ordered by step, then epoch."""

    step: int
    epoch: tuple[int, int, int]

    def __str__(self) -> str:
        attempt, generation, cycle = self.epoch
        return f"step-{self.step:09d}.a{attempt:04d}g{generation:02d}c{cycle:04d}"


def parse_epoch(text: str) -> tuple[int, int, int]:
    """'a0003g01c0002' → (3, 1, 2). ValueError for any other text."""
    match = _EPOCH.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an epoch such as a0003g01c0002")
    return int(match[1]), int(match[2]), int(match[3])


def parse_name(text: str) -> CheckpointName | None:
    """The checkpoint a directory name stands for; None for partial, quarantined and stray names."""
    match = _NAME.fullmatch(text)
    return None if match is None else CheckpointName(int(match[1]), parse_epoch(match[2]))


def partial_name(name: CheckpointName) -> str:
    return f".{name}.partial"


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def box_key(state: str, name: str, offset: Sequence[int]) -> str:
    """Key of one box in a safetensors file: `<state>/<tensor>@<offset>,<offset>`."""
    return f"{state}/{name}@{','.join(map(str, offset))}"
