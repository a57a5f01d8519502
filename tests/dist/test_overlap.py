"""Communication under computation changes no bit, whenever its data moves, and starts in one order on all dp ranks."""

import pytest
from dist.overlap_cases import When, overlapped, stale_weights
from dist.pool import Pool

from trainer.mesh.topology import Topology

CASES: list[tuple[Topology, dict[str, object]]] = [
    (Topology(dp=2), {"tied": False}),
    (Topology(dp=4), {"tied": True, "dtype": "bfloat16"}),
    (Topology(dp=2, pp=2), {"pp_engine": "1f1b", "zero_stage": 0}),
    (Topology(dp=2, pp=2), {"pp_engine": "zb-v", "layers": 4}),
    (Topology(dp=2, pp=2), {"pp_engine": "interleaved", "layers": 4, "tied": False}),
    (Topology(dp=2, pp=2, tp=2), {"pp_engine": "zb-h1", "tp_mode": "REDUCE_SCATTER"}),
]


@pytest.mark.parametrize(("topology", "options"), CASES, ids=str)
def test_when_the_data_moves_changes_no_bit(pool: Pool, topology: Topology, options: dict[str, object]) -> None:
    runs = {when: pool.run(topology, overlapped, topology, when, options) for when in When}
    plain = runs.pop(When.NOTHING_STARTS_EARLY)
    for when, ranks in runs.items():
        for rank, (said, weights, order, early, calls) in enumerate(ranks):
            assert (said, weights, calls) == (plain[rank][0], plain[rank][1], plain[rank][4]), (when, rank)
            assert len(set(order)) == len(order) > 2
            assert min(early) >= len(order) - bool(options.get("tied", True)), "all but the tie's start in backward"
    for group in topology.world_rank_matrix.reshape(topology.dp, -1).T:
        orders = {tuple(ranks[rank][2]) for ranks in runs.values() for rank in group}
        assert len(orders) == 1, "one order on all dp ranks, whenever"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_on_their_way_are_waited_for_by_every_reader(pool: Pool, dtype: str) -> None:
    topology = Topology(dp=2)
    assert pool.run(topology, stale_weights, topology, dtype) == [[True] * 3] * 2
