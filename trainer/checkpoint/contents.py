"""What one rank's file will hold: its boxes in file order, with the values where they live or in a snapshot of them.

A snapshot is one flat buffer in host memory, laid out like the data of the file. It is allocated once, when the run
starts, and used for every save: as many bytes as the rank's file, no more, and a machine too small says so before
training does. On an accelerator it is pinned, so that copies into it run at the speed of the bus.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.checkpoint.boxes import volume
from trainer.checkpoint.naming import box_key, rank_file
from trainer.checkpoint.plan import Piece, owned_boxes, view
from trainer.checkpoint.shards import RankShards
from trainer.device import host_buffer, wait_for_copies
from trainer.optim.layout import STATES


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """file: its name. entries: (key, safetensors dtype, shape) in file order. arrays: their values, in this order."""

    file: str
    entries: tuple[tuple[str, str, tuple[int, ...]], ...]
    arrays: Callable[[], Iterator[NDArray[Any]]]


class RankContents:
    """The boxes that one rank writes, worked out once. `keeps_snapshot`: allocates the buffer for snapshots."""

    def __init__(self, shards: RankShards, *, keeps_snapshot: bool = False) -> None:
        self.file = rank_file(shards.rank)
        self.pieces: tuple[Piece, ...] = owned_boxes(
            shards.specs, shards.layout, shards.topology, shards.rank, shards.zero_stage
        )
        self.entries = tuple(
            (box_key(state, piece.name, piece.box.offset), shards.dtype, piece.box.size)
            for state in STATES
            for piece in self.pieces
        )
        numel = len(STATES) * sum(volume(piece.box) for piece in self.pieces)
        like = next(iter(shards.tensors.values()))
        self._buffer = host_buffer(numel, dtype=like.dtype, source=like.device) if keeps_snapshot else None

    @property
    def snapshot_bytes(self) -> int:
        """Host memory that snapshots take."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def live(self, shards: RankShards) -> Contents:
        """The values as they are when they are read: the state must not move until they are written."""

        def arrays() -> Iterator[NDArray[Any]]:
            for box in self._boxes(shards):
                # cpu() of a CPU tensor is a view: nothing is copied but what crosses from a GPU.
                yield np.ascontiguousarray(box.cpu().numpy())

        return Contents(file=self.file, entries=self.entries, arrays=arrays)

    def snapshot(self, shards: RankShards) -> Contents:
        """The values as they are now; when this returns, the state may move on. Overwrites the snapshot before."""
        assert self._buffer is not None, "made without a buffer"
        at, copies = 0, []
        for box in self._boxes(shards):
            copy = self._buffer[at : at + box.numel()].view(box.shape)
            copy.copy_(box, non_blocking=True)
            copies.append(copy)
            at += box.numel()
        wait_for_copies(next(iter(shards.tensors.values())).device)
        return Contents(file=self.file, entries=self.entries, arrays=lambda: (copy.numpy() for copy in copies))

    def _boxes(self, shards: RankShards) -> Iterator[torch.Tensor]:
        for state in STATES:
            for piece in self.pieces:
                yield view(shards.tensors[state, piece.bucket].detach(), piece)
