"""Lowering and validation: what a schedule must be before anything runs, and errors that show the bad cell."""

from dataclasses import replace

import pytest

from trainer.pipeline.generators import forward_only, make_schedule, one_f_one_b
from trainer.pipeline.lower import chain, lower
from trainer.pipeline.schedule import Action, Op, Placement, Schedule, ScheduleError
from trainer.pipeline.simulate import simulate
from trainer.pipeline.text import parse
from trainer.pipeline.validate import check_complete, check_fifo, check_rendezvous, peaks, validate


def fault(text: str, links: tuple[tuple[int, int], ...] | None = None) -> str:
    """What is said of a hand-written schedule."""
    schedule = parse(text, name="mine")
    with pytest.raises(ScheduleError) as raised:
        validate(schedule, chain(schedule.placement.num_stages) if links is None else links)
    return str(raised.value)


def test_one_stage_is_gradient_accumulation() -> None:
    assert [str(a) for a in one_f_one_b(1, 3).lists[0]] == ["0F0", "0B0", "0F1", "0B1", "0F2", "0B2"]


def test_links_between_distant_stages_are_lowered_too() -> None:
    links = (*chain(4), (0, 2), (1, 3))
    lowered = validate(make_schedule("1f1b", p=4, m=5), links).lists
    assert sum(a.op is Op.SEND_F for a in lowered[0]) == 10 and sum(a.op is Op.RECV_F for a in lowered[3]) == 10
    validate(forward_only(Placement.loop(4), 5), links)


def test_stages_of_one_rank_hand_over_without_a_message() -> None:
    """Down ranks 0 1 and back up: the turn from stage 1 to stage 2 stays on rank 1."""
    schedule = parse("0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1\n1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1", name="v")
    assert schedule.placement == Placement.v_shape(2)
    pairs = {(a.stage, a.peer) for row in validate(schedule, chain(4)).lists for a in row if a.peer is not None}
    assert pairs == {(0, 1), (1, 0), (2, 3), (3, 2)}
    assert simulate(schedule, chain(4)).makespan > 0
    skipping = validate(schedule, (*chain(4), (0, 3))).lists
    assert sum(map(len, skipping)) == sum(map(len, validate(schedule, chain(4)).lists)), "0 and 3 share a rank"


@pytest.mark.parametrize(
    ("text", "said", "cell"),
    [
        ("0F0 0F1 0B0 0B1\n1F0 1B0 1F1", "stage 1 on rank 1 has no B or I of micro-batch 1", "[end]"),
        ("0F0 0B0 0F0\n1F0 1B0", "0F0 on rank 0 repeats what was done before", "[0F0]"),
        ("0F0 0B0 0W0\n1F0 1B0", "0W0 on rank 0 repeats what was done before", "[0W0]"),
        ("0F0 0I0\n1F0 1B0", "stage 0 on rank 0 has no B or W of micro-batch 0", "[end]"),
        ("0F0 0I0 0W0\n1F0 1I0", "stage 1 on rank 1 has no B or W of micro-batch 0", "[end]"),
        ("0F0 0F1 0B1 0B0\n1F0 1F1 1B1 1B0", "rank 0 has 0B0 after micro-batch 1", "[0B0]"),
        ("0F0 0F1 0I0 0I1 0W1 0W0\n1F0 1F1 1B0 1B1", "after micro-batch 1: each stage must run its B or W", "[0W0]"),
        ("0F0 0F1 0I0 0B1 0W0\n1F0 1F1 1B0 1B1", "rank 0 has 0W0 after micro-batch 1", "[0W0]"),
        ("0B0 0F0\n1F0 1B0", "deadlocks: rank 0 at 0B0 waits for 0F0, rank 1 at 1F0 waits for 0F0", "[0B0]"),
        ("0F0 0B0\n1B0 1F0", "deadlocks: rank 0 at 0B0 waits for 1B0, rank 1 at 1B0 waits for 1F0", "[1B0]"),
        ("0F0 0W0 0I0\n1F0 1B0", "rank 0 at 0W0 waits for 0B0", "[0W0]"),
    ],
)  # fmt: skip
def test_faults_are_named_with_the_cell_marked(text: str, said: str, cell: str) -> None:
    message = fault(text)
    assert said in message and cell in message.partition("\n")[2]


def test_the_grid_of_a_long_schedule_shows_the_neighbourhood_of_the_fault() -> None:
    schedule = make_schedule("1f1b", p=4, m=400)
    broken = list(schedule.lists[2])
    broken[300], broken[303] = broken[303], broken[300]
    with pytest.raises(ScheduleError) as raised:
        validate(replace(schedule, lists=(*schedule.lists[:2], tuple(broken), schedule.lists[3])), chain(4))
    grid = str(raised.value).splitlines()[1:]
    assert [line[:6] for line in grid] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert all(len(line) < 200 and "…" in line for line in grid) and f"[{broken[303]}]" in grid[2]


def test_an_action_on_a_foreign_rank_is_named() -> None:
    good = one_f_one_b(2, 2)
    moved = (good.lists[0], (*good.lists[1], Action(Op.F, 0, 1), Action(Op.F, 0, 2)))
    with pytest.raises(
        ScheduleError, match="0F1 stands on rank 1, but stage 0 lives on rank 0; 0F2 on rank 1 is not of"
    ):
        check_complete(replace(good, lists=moved))


def test_many_faults_are_counted() -> None:
    good = one_f_one_b(2, 40)
    with pytest.raises(ScheduleError, match=r"stage 1 on rank 1 has no F of micro-batch 0, 1, 2, 3, 4, 5 and 34 more"):
        check_complete(replace(good, lists=(good.lists[0], ())))


def two(first: tuple[Action, ...], second: tuple[Action, ...], *, m: int) -> Schedule:
    return Schedule(name="mine", placement=Placement.loop(2), m=m, lists=(first, second))


def test_messages_out_of_order_and_crossed_sends_are_refused() -> None:
    lowered = lower(make_schedule("afab", p=2, m=2), chain(2))
    swapped = list(lowered.lists[1])
    first, second = (i for i, a in enumerate(swapped) if a.op is Op.RECV_F)
    swapped[first], swapped[second] = swapped[second], swapped[first]
    with pytest.raises(ScheduleError, match=r"from rank 0 to rank 1 .* from message 0 on(?s:.*)\[1RECV_F1←0\]"):
        check_fifo(replace(lowered, lists=(lowered.lists[0], tuple(swapped))))
    with pytest.raises(ScheduleError, match="from message 1 on"):
        check_fifo(replace(lowered, lists=(lowered.lists[0], tuple(a for i, a in enumerate(swapped) if i != first))))
    crossed = two(
        (Action(Op.F, 0, 0), Action(Op.SEND_F, 0, 0, 1), Action(Op.RECV_B, 0, 0, 1)),
        (Action(Op.SEND_B, 1, 0, 0), Action(Op.RECV_F, 1, 0, 0)), m=1,
    )  # fmt: skip
    with pytest.raises(
        ScheduleError, match="deadlocks: rank 0 at 0SEND_F0→1 waits for 1RECV_F0←0, rank 1 at 1SEND_B0→0"
    ):
        check_rendezvous(crossed, chain(2))


def test_a_receive_that_holds_up_the_send_its_message_waits_for_is_refused() -> None:
    """Messages of a group run one by one on NCCL: 1RECV_F1, posted early, would hold up 1SEND_B0 for ever."""
    there = ((Op.F, None), (Op.SEND_F, 1), (Op.RECV_B, 1), (Op.B, None))
    back = ((Op.RECV_F, 0), (Op.F, None), (Op.B, None), (Op.SEND_B, 0))
    good = [
        tuple(Action(op, rank, i, peer) for i in range(2) for op, peer in ops) for rank, ops in enumerate((there, back))
    ]
    check_rendezvous(two(good[0], good[1], m=2), chain(2))
    early = list(good[1])
    early.insert(1, early.pop(4))
    check_fifo(two(good[0], tuple(early), m=2))
    with pytest.raises(ScheduleError, match=r"deadlocks: rank 0 at 0RECV_B0←1 .*, rank 1 at 1RECV_F1←0"):
        check_rendezvous(two(good[0], tuple(early), m=2), chain(2))


def test_a_send_of_what_is_not_computed_is_refused() -> None:
    good = lower(make_schedule("afab", p=2, m=1), chain(2))
    early = tuple(sorted(good.lists[0], key=lambda action: action.op is not Op.SEND_F))
    with pytest.raises(ScheduleError, match="rank 0 at 0SEND_F0→1"):
        check_rendezvous(replace(good, lists=(early, good.lists[1])), chain(2))


def test_activations_and_pending_weight_gradients_are_counted_apart() -> None:
    schedule = parse("0F0 0F1 0F2 0I0 0I1 0W0 0I2 0W1 0W2", name="mine")
    held = peaks(schedule)
    assert (held.activations, held.pending, held.together) == ((3,), (2,), (3,))


def test_unknown_names_and_sizes() -> None:
    with pytest.raises(ScheduleError, match="unknown schedule 'zb'; known: 1f1b, afab, interleaved, zb-h1, zb-v"):
        make_schedule("zb", p=2, m=2)
    with pytest.raises(ScheduleError, match="not 0, 2, 1"):
        make_schedule("1f1b", p=0, m=2)
    for name, v in (("1f1b", 1), ("zb-h1", 1), ("zb-v", 2)):
        with pytest.raises(ScheduleError, match=f"schedule {name} is made for v = {v} stages a rank, not 3"):
            make_schedule(name, p=2, m=2, v=3)
