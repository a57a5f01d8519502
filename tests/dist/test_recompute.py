"""Recomputation changes no bit: losses, gradient norms, weights and held-out losses of fp32 steps, on every mesh.

Its collectives run in backward as well; were their order not the same on all ranks, these runs would hang or differ.
"""

import pytest
from dist.pool import Pool
from dist.schedule_cases import schedule_bits

from trainer.mesh.topology import Topology

CASES = [
    (Topology(), "ALL_REDUCE", "1f1b", 3), (Topology(pp=4), "ALL_REDUCE", "interleaved", 8),
    (Topology(dp=2, pp=2, tp=2), "ALL_REDUCE", "zb-h1", 4), (Topology(tp=2), "REDUCE_SCATTER", "1f1b", 3),
    (Topology(pp=2, tp=2), "REDUCE_SCATTER", "zb-h1", 4),
]  # fmt: skip
MODES: list[dict[str, object]] = [
    {"recompute": "full"}, {"recompute": "selective"}, {"recompute": "full", "recompute_interval": 3},
]  # fmt: skip


@pytest.mark.parametrize(("topology", "tp_mode", "schedule", "layers"), CASES)
def test_recomputation_changes_no_bit_in_fp32(
    pool: Pool, topology: Topology, tp_mode: str, schedule: str, layers: int
) -> None:
    options: dict[str, object] = {"layers": layers, "pp_engine": schedule, "tp_mode": tp_mode}
    plain = pool.run(topology, schedule_bits, topology, 2, options)
    for mode in MODES:
        assert pool.run(topology, schedule_bits, topology, 2, {**options, **mode}) == plain, mode


def test_recomputation_changes_no_bit_in_bfloat16(pool: Pool) -> None:
    topology, options = Topology(pp=2, tp=2), {"layers": 4, "dtype": "bfloat16", "pp_engine": "zb-h1"}
    plain = pool.run(topology, schedule_bits, topology, 3, options)
    for mode in MODES:
        assert pool.run(topology, schedule_bits, topology, 3, {**options, **mode}) == plain, mode
