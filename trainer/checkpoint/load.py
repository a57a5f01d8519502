"""Read a checkpoint onto any mesh.

All ranks open the tables; each verifies its part of the files, so that every byte is checked once; then each reads the
boxes that intersect what it stores, and exact cover is asserted. If anything is wrong anywhere, every rank raises
CheckpointInvalid with the same file named: the orchestrator, not the trainer, chooses what to load instead.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainer.checkpoint.plan import held_boxes, view
from trainer.checkpoint.reader import BoxReader, Checkpoint, cells, check_file, open_checkpoint
from trainer.checkpoint.shards import RankShards, shards_of
from trainer.checkpoint.state import RunState
from trainer.checkpoint.together import together
from trainer.errors import ConfigError
from trainer.optim.layout import STATES

if TYPE_CHECKING:
    from trainer.engine import Engine


def load_checkpoint(path: Path, engine: "Engine") -> RunState:
    """Load weights and moments into the engine and return the run state. Comm: 3 small all-gathers (world).

    Raises CheckpointInvalid on every rank (a file is missing, cut, changed, or no checkpoint file), ConfigError (the
    config describes another model than the checkpoint holds).
    """
    shards, ctx = shards_of(engine), engine.ctx
    opened: list[Checkpoint] = []

    def open_tables() -> dict[str, Any]:
        opened.append(open_checkpoint(path))
        return {}

    def verify_part() -> dict[str, Any]:
        for record in opened[0].manifest.files[ctx.rank :: ctx.topology.world_size]:
            check_file(path, record)
        return {}

    def read_part() -> dict[str, Any]:
        fill(opened[0], shards)
        return {}

    together(ctx, open_tables)
    together(ctx, verify_part)
    check_model(opened[0], shards)
    together(ctx, read_part)
    engine.sync_params_from_master()
    return opened[0].manifest.state


def check_model(checkpoint: Checkpoint, shards: RankShards) -> None:
    """Raises ConfigError unless the checkpoint holds exactly the tensors of the model, in its precision."""
    saved = {name: tensor.shape for name, tensor in checkpoint.index.tensors.items()}
    wanted = {spec.name: spec.shape for spec in shards.specs}
    where = f"The checkpoint {checkpoint.path} is not of the model this config describes"
    remedy = "Restore the model section the run was started with, or start another run."
    different = sorted(name for name in saved.keys() | wanted.keys() if saved.get(name) != wanted.get(name))
    if different:
        name = different[0]
        raise ConfigError(
            f"{where}: {len(different)} tensors differ, the first is {name} (checkpoint: {saved.get(name)}, config: "
            f"{wanted.get(name)}). {remedy}"
        )
    for name, tensor in checkpoint.index.tensors.items():
        if dict(tensor.states) != dict.fromkeys(STATES, shards.dtype):
            raise ConfigError(f"{where}: {name} is saved as {dict(tensor.states)}, needed is {shards.dtype}. {remedy}")


def fill(checkpoint: Checkpoint, shards: RankShards) -> None:
    """Fill everything this rank stores from the boxes of the checkpoint; padding becomes zero."""
    pieces = held_boxes(shards.specs, shards.layout, shards.topology, shards.rank, shards.zero_stage)
    reader = BoxReader(checkpoint)
    with torch.no_grad():
        for tensor in shards.tensors.values():
            tensor.zero_()
        for piece in pieces:
            for state in STATES:
                target: torch.Tensor = view(shards.tensors[state, piece.bucket], piece)
                for part, values in reader.parts(piece.name, state, piece.box):
                    # A copy, because a tensor over a read-only map is undefined behaviour to torch.
                    target[cells(part)].copy_(torch.from_numpy(np.array(values)))
