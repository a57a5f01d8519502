"""Schedules as text: pawl's own grammar and the CSV that torch's pipelining prints. Pure.

    # one line a rank; stage, F B I or W, micro-batch
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1

In CSV a line is a rank too, `0F0,0F1,,0B0,0B1`, an empty cell a pause. Cells that say when something is moved (SEND_F,
RECV_F, SEND_B, RECV_B, UNSHARD, RESHARD, REDUCE_GRAD) are read over: pawl places its own messages. How many ranks,
stages and micro-batches there are, and which rank holds which stage, follows from the actions. Printing and parsing
are each other's inverse, the name apart.
"""

import csv
import io
import re
from collections.abc import Iterable, Sequence

from trainer.pipeline.schedule import Action, Op, Placement, Schedule, ScheduleError

_COMPUTE = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")
_READ_OVER = re.compile(r"\d{1,9}(?:SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d{0,9}")
# torch prints these names as well as the letters above.
_LONG = {"FORWARD": Op.F, "FULL_BACKWARD": Op.B, "BACKWARD_INPUT": Op.I, "BACKWARD_WEIGHT": Op.W}
_LONG_COMPUTE = re.compile(rf"(\d{{1,9}})({'|'.join(_LONG)})(\d{{1,9}})")

MAX_ACTIONS = 1 << 20
"""A file with more is refused before it is taken apart: its validation alone would take minutes."""


def format_text(schedule: Schedule) -> str:
    """The schedule in pawl's grammar, a comment with its sizes first."""
    placement = schedule.placement
    head = f"# {schedule.name}: {placement.p} ranks, {placement.num_stages} stages, {schedule.m} micro-batches"
    return "\n".join((head, *(" ".join(map(str, actions)) for actions in schedule.lists))) + "\n"


def format_csv(schedule: Schedule) -> str:
    """The schedule in torch's CSV, without pauses."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([str(action) for action in actions] for actions in schedule.lists)
    return out.getvalue()


def parse(text: str, *, name: str) -> Schedule:
    """Read either form; a comma before any comment makes it CSV. `name` is what errors and print-outs call it.

    Raises ScheduleError with the line and cell that cannot be read. Whether the schedule is sound, `validate` says.
    """
    rows = list(_rows(text))
    if not rows:
        raise ScheduleError(f"{name} lists no actions; write one line per rank, such as `0F0 0F1 0B0 0B1`")
    if sum(len(cells) for _, cells in rows) > MAX_ACTIONS:
        raise ScheduleError(f"{name} lists more than {MAX_ACTIONS:,} actions; a schedule is one step, not a run")
    lists = tuple(
        tuple(action for cell in cells if (action := _action(cell, f"{name}, line {line}")) is not None)
        for line, cells in rows
    )
    placement = _placement(lists, [line for line, _ in rows], name)
    m = 1 + max(action.micro_batch for actions in lists for action in actions)
    if m > sum(map(len, lists)):
        raise ScheduleError(f"{name} names micro-batch {m - 1}, but has fewer actions; micro-batches count from 0")
    return Schedule(name=name, placement=placement, m=m, lists=lists)


def _rows(text: str) -> Iterable[tuple[int, Sequence[str]]]:
    """(line number, cells) of every line that is not blank or a comment; a line of commas alone is a rank at rest."""
    for number, line in enumerate(text.lstrip("\ufeff").splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if content:
            cells = next(csv.reader([content])) if "," in content else content.split()
            yield number, [cell.strip() for cell in cells]


def _action(cell: str, where: str) -> Action | None:
    """The computation of a cell; None for a pause or a message."""
    if not cell or _READ_OVER.fullmatch(cell):
        return None
    if found := _COMPUTE.fullmatch(cell):
        return Action(Op(found[2]), int(found[1]), int(found[3]))
    if found := _LONG_COMPUTE.fullmatch(cell):
        return Action(_LONG[found[2]], int(found[1]), int(found[3]))
    shown = cell if len(cell) <= 40 else f"{cell[:40]}…"
    if "OVERLAP_F_B" in cell:
        raise ScheduleError(
            f"{where}: {shown!r} runs a forward and a backward at the same time, which pawl's interpreter does not do; "
            "write the two actions one after the other"
        )
    raise ScheduleError(
        f"{where}: {shown!r} is no action; expected stage, one of F B I W, and micro-batch, such as 2F0"
    )


def _placement(lists: Sequence[Sequence[Action]], lines: Sequence[int], name: str) -> Placement:
    """Which rank holds which stage: each stage's actions stand on one line."""
    ranks: dict[int, int] = {}
    for rank, actions in enumerate(lists):
        if not actions:
            raise ScheduleError(f"{name}, line {lines[rank]}: rank {rank} has no action; every rank must hold a stage")
        for action in actions:
            if ranks.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"{name}, line {lines[rank]}: {action} stands on rank {rank}, but stage {action.stage} is on rank "
                    f"{ranks[action.stage]} (line {lines[ranks[action.stage]]}); a stage lives on one rank"
                )
    last = max(ranks)
    missing = [stage for stage in range(min(last, len(ranks) + 1)) if stage not in ranks]
    if missing:
        raise ScheduleError(f"{name} has actions of stage {last} but none of stage {missing[0]}; stages count from 0")
    return Placement(tuple(ranks[stage] for stage in range(last + 1)))
