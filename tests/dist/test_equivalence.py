"""Every layout computes what one process computes: fp64, 1e-10, against transformers and torch's AdamW.

`make oracle` runs the same on every mesh of at most 8 ranks; one case: python -m dist.oracle --case dp=2,pp=2,tp=1
"""

from itertools import combinations, product

import pytest
from dist.axes import AXES, Case, checked, is_legal, is_telling
from dist.bits import Player, Twins, parse_twins, twins_of
from dist.case import QUICK_STEPS
from dist.choice import FIXED, full_axes, full_cases, quick_axes, quick_cases
from dist.covering import all_pairs
from dist.pool import Pool
from dist.verdict import judge

# All relations on cases between which every one of them has something to change, in fp32 and in bf16.
BASES = (
    Case.of(dp=2, pp=2, tp=2, schedule="zb-h1", sp=True, recompute="full", zero=0, bucket=100),
    Case.of(pp=4, schedule="interleaved", layers=8, split="01211111", masks=True, tied=False, m=3),
    Case.of(dp=4, zero=0, kv="one", vocab=509),
    Case.of(dp=2, pp=2, schedule="zb-h1", recompute="selective", zero=0, bucket=100, dtype="bfloat16"),
)


@pytest.mark.parametrize("case", quick_cases(), ids=str)
def test_layout_equals_one_process(pool: Pool, case: Case) -> None:
    """P2 P3 P4 P6 P16, L1 L2 L7 T1 T2 T6 T7 T8 T9 G1 G3 G4 W1 W2 W3, C3.

    Loss, norm, gradients, weights, tied copies and replicas on every layout.
    """
    assert judge(pool, case, QUICK_STEPS).faults == ()


@pytest.fixture(scope="module")
def player(pool: Pool) -> Player:
    return Player(pool)


@pytest.mark.parametrize("twins", twins_of(BASES), ids=str)
def test_what_must_not_change_a_bit_does_not(player: Player, twins: Twins) -> None:
    assert player.faults(twins) == ()


def test_the_quick_cases_are_few_and_hold_every_legal_pair_of_values() -> None:
    """After a change of AXES: PYTHONPATH=tests python -m dist.choice"""
    cases = quick_cases()
    assert len(cases) <= 38 and all(is_legal(case) for case in cases) and cases[: len(FIXED)] == FIXED
    assert {8} == {max(case[size] for case in cases) for size in ("dp", "pp", "tp")}
    exact = [case for case in cases if case["dtype"] == "float64"]
    for (a, x), (b, y) in all_pairs(quick_axes()):
        if not any(case[a] == x and case[b] == y for case in exact):
            assert not is_telling(Case.of(**{a: x, b: y})), f"no case has {a}={x}, {b}={y}"


def test_every_value_of_every_axis_occurs() -> None:
    for axis in AXES:
        assert {case[axis.name] for case in quick_cases()} >= set(axis.values), axis.name


def test_the_full_oracle_has_every_legal_mesh_with_every_schedule() -> None:
    """With some options: a mesh of 8 stages needs 8 layers."""
    axes = full_axes()
    found = {(case.dp, case.pp, case.tp, case["schedule"]) for case in full_cases() if case["dtype"] == "float64"}
    for (dp, pp, tp), schedule in product(axes["mesh"], axes["schedule"]):
        options = (Case.of(dp=dp, pp=pp, tp=tp, schedule=schedule, layers=layers) for layers in axes["layers"])
        assert ((dp, pp, tp, schedule) in found) == any(map(is_legal, options)), (dp, pp, tp, schedule)
    assert len(found) > 150 and set(full_cases()) >= set(quick_cases())
    assert {case[axis.name] for case in full_cases() for axis in AXES} == {v for a in AXES for v in a.all_values}


def test_a_case_reads_back_from_its_name() -> None:
    cases = quick_cases()
    assert [Case.parse(str(case)) for case in cases] == list(cases) and len(set(map(str, cases))) == len(cases)
    assert [parse_twins(str(twins)) for twins in twins_of(BASES)] == list(twins_of(BASES))
    with pytest.raises(ValueError, match="tied is one of True, False"):
        Case.parse("dp=2,tied=maybe")
    with pytest.raises(ValueError, match="no axis zoro"):
        Case.parse("dp=2,zoro=1")


def test_what_the_product_refuses_is_no_case() -> None:
    """P1, T3: kv heads that tp does not divide are refused by `check`, with the key and the sizes that would do."""
    config, refusals = checked(Case.of(tp=2, kv="one"))
    assert config is None and "parallelism.tp 4 heads and 1 kv heads" in refusals[0] and "tp one of 1" in refusals[0]
    assert not is_legal(Case.of(pp=5)) and is_legal(Case.of(pp=5, layers=5)) and not is_legal(Case.of(dp=3, tp=3))


def test_names_of_axes_are_told_apart() -> None:
    names = ["dp", "pp", "tp", *(axis.name for axis in AXES)]
    assert len(set(names)) == len(names)
    assert all(value != other for axis in AXES for value, other in combinations(map(str, axis.all_values), 2))
