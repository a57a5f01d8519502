"""Weights of a checkpoint into a run that starts afresh: step 0, moments zero, data from the start.

The checkpoint is another run's, or imported; any mesh wrote it and any mesh reads it, in any floating dtype. Whatever
is wrong with it is the config's fault (`model.init_method.path` names it), so no rank asks for an older checkpoint.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.checkpoint.match import KEY, misfit, open_start, other_numbers
from trainer.checkpoint.plan import held_boxes, view
from trainer.checkpoint.reader import BoxReader, Checkpoint, cells, check_file
from trainer.checkpoint.shards import RankShards, shards_of
from trainer.checkpoint.together import together
from trainer.errors import CheckpointInvalid, ConfigError

if TYPE_CHECKING:
    from trainer.engine import Engine

# numpy has no bfloat16: its bits come as uint16.
_BITS = {"BF16": (np.int16, torch.bfloat16)}


def load_weights(path: Path, engine: "Engine") -> tuple[str, ...]:
    """Load the weights into the engine, moments zero. Comm: 3 small all-gathers (world).

    Returns a sentence for each fact of the model that the checkpoint was made with another value of. Raises
    ConfigError on every rank (no checkpoint there, damaged, of another shape, a rank cannot read it).
    """
    shards, ctx = shards_of(engine), engine.ctx
    opened: list[Checkpoint] = []

    def open_tables() -> dict[str, Any]:
        opened.append(open_start(path))
        return {}

    def verify_part() -> dict[str, Any]:
        for record in opened[0].manifest.files[ctx.rank :: ctx.topology.world_size]:
            check_file(path, record)
        return {}

    def read_part() -> dict[str, Any]:
        fill_weights(opened[0], shards)
        return {}

    try:
        together(ctx, open_tables)
        different = misfit(opened[0], shards.specs)
        if different is not None:
            raise ConfigError(
                f"{KEY}: the checkpoint {path} is not of the model this config describes: {different}. Use the model "
                "section of its config.yaml, or name another checkpoint."
            )
        together(ctx, verify_part)
        together(ctx, read_part)
    except CheckpointInvalid as error:
        raise ConfigError(f"{KEY}: {error}") from error
    engine.sync_params_from_master()
    return tuple(other_numbers(opened[0], engine.config))


def fill_weights(checkpoint: Checkpoint, shards: RankShards) -> None:
    """Fill the master weights this rank stores, cast to its dtype; moments and padding become zero."""
    reader = BoxReader(checkpoint)
    with torch.no_grad():
        for tensor in shards.tensors.values():
            tensor.zero_()
        for piece in held_boxes(shards.specs, shards.layout, shards.topology, shards.rank, shards.zero_stage):
            target: torch.Tensor = view(shards.tensors["master", piece.bucket], piece)
            dtype = checkpoint.index.tensors[piece.name].states["master"]
            for part, values in reader.parts(piece.name, "master", piece.box):
                target[cells(part)].copy_(as_torch(values, dtype))


def as_torch(values: NDArray[Any], dtype: str) -> torch.Tensor:
    """A copy of values of a safetensors dtype: a tensor over a read-only map is undefined behaviour to torch."""
    copied = np.array(values)
    if dtype in _BITS:
        bits, real = _BITS[dtype]
        return torch.from_numpy(copied.view(bits)).view(real)
    return torch.from_numpy(copied)
