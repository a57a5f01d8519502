"""What one rank stores, seen apart from the engine: specs, layout, place on the mesh, and the flat tensors.

Save and load work on this record alone. So a whole mesh can be written and read in one process, rank after rank,
which is how every pair of meshes is tested.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from trainer.checkpoint.index import TORCH_NAMES
from trainer.mesh.topology import Topology
from trainer.optim.layout import Layout, plan_rank_layout
from trainer.spec import ParamSpec

if TYPE_CHECKING:
    from trainer.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShards:
    """specs: of the whole model. layout_of: of any rank. tensors: (state, bucket) → the stored 1-D tensor itself."""

    specs: Sequence[ParamSpec]
    topology: Topology
    layout_of: Callable[[int], Layout]
    rank: int
    zero_stage: int
    tensors: Mapping[tuple[str, int], torch.Tensor]

    @property
    def layout(self) -> Layout:
        return self.layout_of(self.rank)

    @property
    def dtype(self) -> str:
        """Safetensors dtype of every state."""
        tensor = next(iter(self.tensors.values()))
        return TORCH_NAMES[str(tensor.dtype).removeprefix("torch.")]


def shards_of(engine: "Engine") -> RankShards:
    """The shards of a live engine; the tensors are its own storage, not copies."""
    numel = engine.bucket_numel
    layout_of = partial(plan_rank_layout, engine.specs, engine.topology, bucket_numel=numel)
    assert layout_of(engine.ctx.rank) == engine.layout, "the index would not describe what this rank stores"
    return RankShards(
        specs=engine.specs,
        topology=engine.topology,
        layout_of=layout_of,
        rank=engine.ctx.rank,
        zero_stage=engine.config.optimizer.zero_stage,
        tensors=engine.state_shards(),
    )
