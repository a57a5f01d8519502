"""Schedules as data: the formulas of the literature as properties of every generator, on a clock."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.pipeline.generators import GENERATORS, forward_only, make_schedule, placement_of
from trainer.pipeline.lower import chain
from trainer.pipeline.schedule import Op, Placement, Schedule
from trainer.pipeline.simulate import Costs, Simulation, simulate, unsynchronised_period
from trainer.pipeline.validate import peaks, validate

ranks, micro_batches, virtual = st.integers(1, 8), st.integers(1, 32), st.integers(1, 4)
costs = st.builds(Costs, forward=st.integers(1, 5), input=st.integers(1, 5), weight=st.integers(0, 5))
few = settings(max_examples=30, deadline=None)


def run(schedule: Schedule, c: Costs) -> Simulation:
    return simulate(schedule, chain(schedule.placement.num_stages), c)


def idle(schedule: Schedule, c: Costs) -> float:
    """makespan − ideal; the ideal is also asserted."""
    simulation = run(schedule, c)
    assert simulation.ideal == pytest.approx(schedule.m * (c.forward + c.input + c.weight))
    return simulation.makespan - simulation.ideal


@pytest.mark.parametrize("name", ["1f1b", "afab"])
@given(p=ranks, m=micro_batches, c=costs)
@few
def test_bubble_of_1f1b_and_afab(name: str, p: int, m: int, c: Costs) -> None:
    assert idle(make_schedule(name, p=p, m=m), c) == pytest.approx((p - 1) * (c.forward + c.input + c.weight))


@given(p=ranks, m=micro_batches, v=virtual, c=costs)
@few
def test_bubble_of_interleaved(p: int, m: int, v: int, c: Costs) -> None:
    """For every m ≥ p, whether p divides it or not; each micro-batch fewer than p costs (v − 1)/v more."""
    missing = max(0, p - m) * (v - 1)
    expected = (p - 1 + missing) * (c.forward + c.input + c.weight) / v
    assert idle(make_schedule("interleaved", p=p, m=m, v=v), c) == pytest.approx(expected)


@given(p=ranks, more=st.integers(0, 24), c=costs)
@few
def test_bubble_of_zb_h1(p: int, more: int, c: Costs) -> None:
    """(p − 1)(f + b − w) for w ≤ f and w ≤ b; a longer W fills no more than the shorter of these."""
    expected = (p - 1) * (c.forward + c.input - min(c.forward, c.input, c.weight))
    assert idle(make_schedule("zb-h1", p=p, m=p + more), c) == pytest.approx(expected)


@given(p=ranks, more=st.integers(0, 16))
@few
def test_zb_v_has_no_bubble_but_the_skew(p: int, more: int) -> None:
    """The skew of (p − 1) b/2 is what the clipping barrier costs; ranks that do not wait have no bubble at all."""
    schedule, m = make_schedule("zb-v", p=p, m=2 * p + more), 2 * p + more
    assert idle(schedule, Costs()) == pytest.approx((p - 1) / 2)
    assert unsynchronised_period(schedule, chain(2 * p), Costs()) == pytest.approx(3 * m)
    assert peaks(schedule).together == (2 * p,) * p


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_schedule_without_skew_gains_nothing_where_the_barrier_falls(name: str) -> None:
    schedule = make_schedule(name, p=4, m=8)
    period = unsynchronised_period(schedule, chain(4), Costs())
    assert period == run(schedule, Costs()).makespan


@given(p=ranks, m=micro_batches, v=st.integers(2, 4))
@few
def test_peaks(p: int, m: int, v: int) -> None:
    everyone = range(p)
    assert peaks(make_schedule("1f1b", p=p, m=m)).activations == tuple(min(p - r, m) for r in everyone)
    assert peaks(make_schedule("afab", p=p, m=m)).activations == (m,) * p
    split = peaks(make_schedule("zb-h1", p=p, m=m))
    assert split.activations == tuple(min(p - r, m) for r in everyone)
    assert split.pending == tuple(min(r + 1, m) for r in everyone)
    assert split.together == (min(p, m),) * p
    whole = m - m % p or p
    chunks = peaks(make_schedule("interleaved", p=p, m=whole, v=v)).activations
    assert chunks == tuple(min(whole * v, (v - 1) * p + 2 * (p - 1 - r) + 1) for r in everyone)


@given(p=ranks, m=micro_batches, v=virtual, name=st.sampled_from(sorted(GENERATORS)))
@few
def test_every_schedule_is_valid_with_the_messages_of_a_chain(p: int, m: int, v: int, name: str) -> None:
    schedule = make_schedule(name, p=p, m=m, v=v if name in ("interleaved", "afab") else None)
    stages = schedule.placement.num_stages
    assert schedule.placement == placement_of(name, p=p, v=schedule.placement.v)
    lowered = validate(schedule, chain(stages))
    sent = [action for actions in lowered.lists for action in actions if action.op in (Op.SEND_F, Op.SEND_B)]
    turns = sum(a == b for a, b in pairwise(schedule.placement.ranks))
    assert len(sent) == 2 * (stages - 1 - turns) * m


@pytest.mark.parametrize(
    "placement", [Placement.loop(4), Placement.loop(3, 4), Placement.v_shape(4), Placement((1, 0, 1))]
)
@pytest.mark.parametrize("m", [1, 3, 4, 9])
def test_forward_only_is_valid_on_every_placement(placement: Placement, m: int) -> None:
    links = (*chain(placement.num_stages), (0, 2))
    schedule = forward_only(placement, m)
    assert sum(map(len, validate(schedule, links).lists)) >= m * placement.num_stages
    assert set(peaks(schedule).together) == {0}
