"""Schedules as text: printing and parsing are inverse, torch reads what is printed, errors name line and cell."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import _Action

from trainer.pipeline.generators import GENERATORS, make_schedule
from trainer.pipeline.schedule import Action, Op, Placement, Schedule, ScheduleError
from trainer.pipeline.text import format_csv, format_text, parse


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any lists of actions that name every stage on its rank, sound or not."""
    p = draw(st.integers(1, 4))
    ranks = draw(st.permutations([*range(p), *draw(st.lists(st.integers(0, p - 1), max_size=4))]))
    m = draw(st.integers(1, 5))
    every = [Action(op, stage, i) for stage in range(len(ranks)) for op in (Op.F, Op.B, Op.I, Op.W) for i in range(m)]
    needed = [Action(Op.F, stage, m - 1) for stage in range(len(ranks))]
    order = draw(st.permutations([*needed, *draw(st.lists(st.sampled_from(every), max_size=12)), *needed * (m - 1)]))
    lists = tuple(tuple(action for action in order if ranks[action.stage] == rank) for rank in range(p))
    return Schedule(name="mine", placement=Placement(tuple(ranks)), m=m, lists=lists)


@given(schedule=schedules())
@settings(max_examples=60, deadline=None)
def test_printing_and_parsing_are_inverse(schedule: Schedule) -> None:
    assert parse(format_text(schedule), name="mine") == schedule
    assert parse(format_csv(schedule), name="mine") == schedule


@pytest.mark.parametrize("name", GENERATORS)
def test_torch_reads_every_cell_as_it_is_meant(name: str) -> None:
    schedule = make_schedule(name, p=3, m=5, v=None)
    for line, actions in zip(format_csv(schedule).splitlines(), schedule.lists, strict=True):
        for cell, action in zip(line.split(","), actions, strict=True):
            theirs = _Action.from_str(cell)
            assert (theirs.stage_index, theirs.microbatch_index) == (action.stage, action.micro_batch)
            assert theirs.computation_type.value == action.op and repr(theirs) == cell


def test_what_torch_prints_is_read_over_where_pawl_does_it_itself() -> None:
    theirs = (
        "0UNSHARD,0F0,0SEND_F0,0F1,,0RECV_B0,0B0,0REDUCE_GRAD,0B1,0RESHARD\r\n"
        "1RECV_F0,1F0,1I0,1W0,1SEND_B0,,1F1,1FULL_BACKWARD1\r\n"
    )
    assert format_text(parse(theirs, name="t")).splitlines()[1:] == ["0F0 0F1 0B0 0B1", "1F0 1I0 1W0 1F1 1B1"]


def test_comments_blank_lines_and_spaces() -> None:
    text = "\ufeff# mine, by hand\n\n  0F0   0B0  # rank 0\n\n1F0\t1B0 \n"
    assert parse(text, name="t") == parse("0F0, 0B0\n1F0 ,1B0", name="t")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# nothing\n\n", "mine lists no actions; write one line per rank"),
        ("0F0 0B0\n1F0 1X0", "mine, line 2: '1X0' is no action; expected stage, one of F B I W, and micro-batch"),
        ("# a\n0F0 F1", "mine, line 2: 'F1' is no action"),
        ("0f0", "'0f0' is no action"),
        ("-1F0", "'-1F0' is no action"),
        ("0F0,(0F1;1B0)OVERLAP_F_B", "'(0F1;1B0)OVERLAP_F_B' runs a forward and a backward at the same time"),
        ("0F0 0B0\n,,,\n", "mine, line 2: rank 1 has no action; every rank must hold a stage"),
        ("0F0 1B0\n1F0 0B0", "mine, line 2: 1F0 stands on rank 1, but stage 1 is on rank 0 (line 1)"),
        ("0F0 0B0\n2F0 2B0", "mine has actions of stage 2 but none of stage 1"),
        ("0F999999999", "mine names micro-batch 999999999, but has fewer actions"),
        ("999999999F0", "mine has actions of stage 999999999 but none of stage 0"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, said: str) -> None:
    with pytest.raises(ScheduleError) as raised:
        parse(text, name="mine")
    assert said in str(raised.value)


def test_a_file_that_is_not_one_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.pipeline.text.MAX_ACTIONS", 3)
    with pytest.raises(ScheduleError, match="more than 3 actions"):
        parse("0F0 0B0\n1F0 1B0", name="mine")
