"""Schedules change the order of work and no bit: every one on every pp against pp = 1, in fp32.

The gradient norm is a sum over ranks in fp64: other pipeline ranks add its parts in another order, so it is compared to
the last digits instead.
"""

from pathlib import Path

import pytest
from dist.pool import Pool
from dist.schedule_cases import schedule_bits

from trainer.mesh.topology import Topology
from trainer.pipeline.generators import GENERATORS, make_schedule
from trainer.pipeline.text import format_csv

LAYERS = 8

Run = tuple[list[tuple[float, float]], tuple[float, int]]


def assert_same(ours: Run, theirs: Run, what: str) -> None:
    """Losses and the held-out loss bit for bit, gradient norms but for the order of fp64 sums."""
    assert ([loss for loss, _ in ours[0]], ours[1]) == ([loss for loss, _ in theirs[0]], theirs[1]), what
    assert [norm for _, norm in ours[0]] == pytest.approx([norm for _, norm in theirs[0]], rel=1e-14, abs=0), what


@pytest.mark.parametrize("tied", [True, False])
def test_no_schedule_changes_a_bit_in_fp32(pool: Pool, tied: bool, tmp_path: Path) -> None:
    """L2, W3: m = 5: divisible by neither 2 nor 4, and more than 4. One of the schedules comes from a file of the
    user's.
    """
    mine = tmp_path / "mine.csv"
    mine.write_text(format_csv(make_schedule("interleaved", p=2, m=5, v=3)))
    cases: list[tuple[int, dict[str, object]]] = [(p, {"pp_engine": name}) for name in GENERATORS for p in (2, 4)]
    cases += [(2, {"pp_engine": str(mine), "virtual_stages": 3}), (4, {"pp_engine": "afab", "virtual_stages": 2})]
    cases += [(2, {"pp_engine": "interleaved", "layers_per_stage": [0, 3, 4, 1]})]
    options: dict[str, object] = {"tied": tied, "layers": LAYERS}
    ((steps, validation, weights),) = pool.run(Topology(), schedule_bits, Topology(), 5, options)
    for p, choice in cases:
        held: set[str] = set()
        for other in pool.run(Topology(pp=p), schedule_bits, Topology(pp=p), 5, {**options, **choice}):
            assert_same(other[:2], (steps, validation), f"pp = {p}, {choice}")
            assert all(weights[name] == value for name, value in other[2].items()), f"pp = {p}, {choice}"
            held |= set(other[2])
        assert held == set(weights)


@pytest.mark.parametrize("name", ["interleaved", "zb-h1", "zb-v"])
def test_schedules_under_dp_and_tp_change_no_bit_in_fp32(pool: Pool, name: str) -> None:
    topology, options = Topology(dp=2, pp=2, tp=2), {"layers": 4, "tied": True}
    plain = pool.run(topology, schedule_bits, topology, 4, options)
    others = pool.run(topology, schedule_bits, topology, 4, {**options, "pp_engine": name})
    for (steps, validation, _), (other_steps, other_validation, _) in zip(plain, others, strict=True):
        assert_same((other_steps, other_validation), (steps, validation), name)
    for tp in range(2):  # stages lie on other ranks: compare what all ranks of one tp coordinate hold
        weights, other_weights = (
            {n: d for rank, run in enumerate(runs) if topology.coord(rank).tp == tp for n, d in run[2].items()}
            for runs in (plain, others)
        )
        assert weights == other_weights


def test_a_step_smaller_than_the_pipeline_changes_no_bit_either(pool: Pool) -> None:
    """P4."""
    options: dict[str, object] = {"layers": LAYERS}
    ((steps, validation, _),) = pool.run(Topology(), schedule_bits, Topology(), 2, options)
    for name in GENERATORS:
        (first, *_) = pool.run(Topology(pp=4), schedule_bits, Topology(pp=4), 2, {**options, "pp_engine": name})
        assert_same(first[:2], (steps, validation), name)
