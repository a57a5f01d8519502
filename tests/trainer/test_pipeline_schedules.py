"""Schedules as data: the formulas of the literature as properties, lowering and validation."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.pipeline.cli import render
from trainer.pipeline.lower import chain, lower
from trainer.pipeline.schedule import SCHEDULES, Action, Op, forward_only, make_schedule, one_f_one_b
from trainer.pipeline.simulate import Costs, simulate
from trainer.pipeline.validate import check_complete, check_fifo, check_rendezvous, peak_activations, validate

stages, micro_batches = st.integers(1, 8), st.integers(1, 32)


@pytest.mark.parametrize("name", SCHEDULES)
@given(p=stages, m=micro_batches)
@settings(max_examples=40, deadline=None)
def test_every_schedule_is_valid_and_has_the_known_bubble(name: str, p: int, m: int) -> None:
    schedule = make_schedule(name, p=p, m=m)
    lowered = validate(schedule, chain(p), m=m)
    run = simulate(schedule, chain(p), Costs(forward=1, backward=2))
    assert run.makespan - run.ideal == pytest.approx((p - 1) * 3)
    assert run.bubble_of_ideal == pytest.approx((p - 1) / m)
    assert run.bubble_of_total == pytest.approx((p - 1) / (m + p - 1))
    messages = sum(action.peer is not None for actions in lowered for action in actions)
    assert messages == 4 * (p - 1) * m  # forward and backward, each a send and a receive


@given(p=stages, m=micro_batches)
@settings(max_examples=40, deadline=None)
def test_peak_activations(p: int, m: int) -> None:
    assert peak_activations(make_schedule("1f1b", p=p, m=m)) == tuple(min(p - r, m) for r in range(p))
    assert peak_activations(make_schedule("afab", p=p, m=m)) == (m,) * p


def test_one_stage_is_gradient_accumulation() -> None:
    assert [str(a) for a in one_f_one_b(1, 3)[0]] == ["0F0", "0B0", "0F1", "0B1", "0F2", "0B2"]


def test_backwards_run_in_micro_batch_order_on_every_stage() -> None:
    for name in SCHEDULES:
        for actions in make_schedule(name, p=4, m=6):
            order = [a.micro_batch for a in actions if a.op is Op.B]
            assert order == sorted(order)


def test_links_between_distant_stages_are_lowered_too() -> None:
    links = (*chain(4), (0, 2), (1, 3))
    lowered = validate(make_schedule("1f1b", p=4, m=5), links, m=5)
    assert sum(a.op is Op.SEND_F for a in lowered[0]) == 10 and sum(a.op is Op.RECV_F for a in lowered[3]) == 10
    validate(forward_only(4, 5), links, m=5)


def test_a_missing_a_repeated_and_a_foreign_action_are_named() -> None:
    good = [list(actions) for actions in one_f_one_b(2, 2)]
    with pytest.raises(ValueError, match=r"rank 1: missing actions \['1B1'\]"):
        check_complete((tuple(good[0]), tuple(good[1][:-1])), m=2)
    with pytest.raises(ValueError, match="repeated or foreign"):
        check_complete((tuple(good[0]), (*good[1], good[1][0])), m=2)


def test_a_schedule_that_waits_for_itself_is_refused() -> None:
    f, b = (Action(Op.F, 0, 0), Action(Op.F, 1, 0)), (Action(Op.B, 0, 0), Action(Op.B, 1, 0))
    with pytest.raises(ValueError, match=r"deadlocks: rank 0 at 0B0, rank 1 at 1F0"):
        lower(((b[0], f[0]), (f[1], b[1])), chain(2))


def test_messages_out_of_order_and_crossed_sends_are_refused() -> None:
    lowered = [list(actions) for actions in lower(make_schedule("afab", p=2, m=2), chain(2))]
    receives = [i for i, a in enumerate(lowered[1]) if a.op is Op.RECV_F]
    swapped = [list(actions) for actions in lowered]
    first, second = receives
    swapped[1][first], swapped[1][second] = swapped[1][second], swapped[1][first]
    with pytest.raises(ValueError, match="rank 0 to rank 1"):
        check_fifo(tuple(tuple(actions) for actions in swapped))
    crossed = (
        (Action(Op.F, 0, 0), Action(Op.SEND_F, 0, 0, 1), Action(Op.RECV_B, 0, 0, 1)),
        (Action(Op.SEND_B, 1, 0, 0), Action(Op.RECV_F, 1, 0, 0)),
    )
    with pytest.raises(ValueError, match="deadlocks: rank 0 at 0SEND_F0→1, rank 1 at 1SEND_B0→0"):
        check_rendezvous(crossed, chain(2))


def test_a_receive_that_holds_up_the_send_its_message_waits_for_is_refused() -> None:
    """Messages of a group run one by one on NCCL: 1RECV_F1, posted early, would hold up 1SEND_B0 for ever."""
    there = ((Op.F, None), (Op.SEND_F, 1), (Op.RECV_B, 1), (Op.B, None))
    back = ((Op.RECV_F, 0), (Op.F, None), (Op.B, None), (Op.SEND_B, 0))
    good = tuple(
        tuple(Action(op, rank, i, peer) for i in range(2) for op, peer in ops) for rank, ops in enumerate((there, back))
    )
    check_rendezvous(good, chain(2))
    early = list(good[1])
    early.insert(1, early.pop(4))
    check_fifo((good[0], tuple(early)))
    with pytest.raises(ValueError, match="deadlocks: rank 0 at 0RECV_B0←1, rank 1 at 1RECV_F1←0"):
        check_rendezvous((good[0], tuple(early)), chain(2))


def test_unknown_names_and_sizes() -> None:
    with pytest.raises(ValueError, match="unknown schedule 'zb'; known: 1f1b, afab"):
        make_schedule("zb", p=2, m=2)
    with pytest.raises(ValueError, match="not p = 0, m = 2"):
        make_schedule("1f1b", p=0, m=2)


def test_printed_grid() -> None:
    lines = render("1f1b", p=2, m=3).splitlines()
    assert lines[1].split() == ["rank", "0", "F0", "F1", "·", "·", "B0", "B0", "F2", "B1", "B1", "·", "B2", "B2"]
    assert lines[2].split() == ["rank", "1", "·", "F0", "B0", "B0", "F1", "B1", "B1", "F2", "B2", "B2", "·", "·"]
    assert "bubble 33.3% of ideal time, 25.0% of total time" in lines[4]
