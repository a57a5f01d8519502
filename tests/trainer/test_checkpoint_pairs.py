"""Twelve layouts, each read from each other's checkpoint: all 132 ordered pairs, without processes, bit for bit.

Every canonical tensor holds a hash of its name and element number (`checkpoint_world.expected`), so a box that is read
from the wrong place, twice or never shows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from checkpoint_world import assert_filled, empty_rank, expected, filled_rank, make_specs, save_world

from trainer.checkpoint.load import check_model, fill
from trainer.checkpoint.reader import BoxReader, Checkpoint, open_checkpoint
from trainer.checkpoint.shards import RankShards
from trainer.mesh.topology import Topology
from trainer.optim.layout import STATES
from trainer.pipeline.schedule import Placement
from trainer.spec import ParamSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A layout: mesh, ZeRO stage, which stage is where (the schedule's), elements per bucket."""

    dp: int = 1
    pp: int = 1
    tp: int = 1
    zero: int = 1
    stages: Placement | None = None
    bucket: int = 200

    @property
    def mesh(self) -> Topology:
        return Topology(dp=self.dp, pp=self.pp, tp=self.tp)

    def specs(self, *, tied: bool) -> tuple[ParamSpec, ...]:
        return make_specs(self.mesh, tied=tied, placement=self.stages)

    def ranks(self, *, tied: bool, filled: bool) -> list[RankShards]:
        make, specs = filled_rank if filled else empty_rank, self.specs(tied=tied)
        return [
            make(specs, self.mesh, rank, zero_stage=self.zero, bucket_numel=self.bucket)
            for rank in range(self.mesh.world_size)
        ]


WAYS = {
    "one process": Way(),
    "one process, three stages": Way(stages=Placement.loop(1, 3)),
    "dp 2": Way(dp=2),
    "dp 3, ZeRO-0, tiny buckets": Way(dp=3, zero=0, bucket=17),
    "dp 8": Way(dp=8),
    "tp 2": Way(tp=2, bucket=100),
    "tp 4, dp 2": Way(tp=4, dp=2),
    "pp 2, 1f1b": Way(pp=2),
    "pp 2, interleaved": Way(pp=2, stages=Placement.loop(2, 2)),
    "pp 2, V of zb-v": Way(pp=2, dp=2, stages=Placement.v_shape(2), bucket=1 << 20),
    "pp 2, tp 2, dp 2": Way(pp=2, tp=2, dp=2),
    "pp 3, tp 3, ZeRO-0": Way(pp=3, tp=3, dp=2, zero=0, bucket=61),
}
"""Sequence parallelism moves no weight, so it is in the training around these."""


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Checkpoint]]:
    """A checkpoint of each layout, by name."""
    root, tied = tmp_path_factory.mktemp("ways"), request.param
    found: dict[str, Checkpoint] = {}
    for number, (name, way) in enumerate(WAYS.items()):
        path = save_world(
            root / str(number), way.specs(tied=tied), way.mesh, zero_stage=way.zero, bucket_numel=way.bucket
        )
        found[name] = open_checkpoint(path)
    yield found


def is_tied(checkpoint: Checkpoint) -> bool:
    return "lm_head.weight" not in checkpoint.index.tensors


@pytest.mark.parametrize("target", WAYS)
def test_all_ordered_pairs_of_layouts_bit_for_bit(target: str, saved: dict[str, Checkpoint]) -> None:
    """R8 (nanotron#23, #37): the other eleven, and itself, read onto this one."""
    assert len(WAYS) == 12
    tied = is_tied(saved[target])
    right = WAYS[target].ranks(tied=tied, filled=True)
    for checkpoint in saved.values():
        for shards, want in zip(WAYS[target].ranks(tied=tied, filled=False), right, strict=True):
            check_model(checkpoint, shards)
            fill(checkpoint, shards)
            assert_filled(shards, want)


@pytest.mark.parametrize("source", WAYS)
def test_each_layout_holds_the_same_canonical_tensors(source: str, saved: dict[str, Checkpoint]) -> None:
    reader = BoxReader(saved[source])
    for spec in WAYS[source].specs(tied=is_tied(saved[source])):
        for state in STATES:
            assert np.array_equal(reader.tensor(spec.name, state), expected(state, spec).numpy())
