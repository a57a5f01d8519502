"""Where a run's wall time went: exclusive categories that sum to it, to the microsecond.

    run_created ─queue─ attempt_started ─preflight─ cycle_started ─start·rendezvous·restore·compile─ steps … ─ …
                                                                each step: data_stall + work + save_blocking (+ eval)
    a fault:  last step ─recompute─ fault ─hang─ noticed ─recovery (backoff inside)─ next cycle_started

Time is painted on a tape with one cursor, in whole microseconds, so nothing is counted twice and nothing is left out:
the sum is the wall time by construction. Work of a step is *provisional* until a checkpoint that counts covers it; then
it is productive for ever, or, when a later cycle resumed from before it, recompute. Time whose cause is not settled yet
(the step in progress, a start in progress) is provisional as well, so no settled category ever shrinks.

A run that is done, drained or cancelled is over: its wall time ends there. Resumed from a drain, the time between is
`drained`; resumed from a cancel, it is left out, for in it there was no run.

`start` is also the stopping of a clean end. Rank-seconds weigh the same time by the ranks the attempt held.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from orchestrator.state.counting import CycleFence, fences_of, survives
from orchestrator.state.epochs import Epoch
from orchestrator.state.records import Event
from orchestrator.state.rundir import CheckpointName
from orchestrator.state.train_lines import StepLine, ValidationLine, finite
from orchestrator.views.goodput_tape import Account, Category, Tape

_CLEAN = {"done", "drained", "cancelled", "failed", "continue"}
_CLOSES_CYCLE = {"attempt_ended", "attempt_started", "attempt_intent", "run_done", "run_held", "run_failed", "resumed"}


def account(
    events: Sequence[Event], lines: Iterable[StepLine], now: float, *, evals: Iterable[ValidationLine] = ()
) -> Account:
    """The account of a run at `now` (seconds since 1970). Any order of events and any clock step is accepted."""
    painter = _Painter(timed=_on_one_clock(events), lines=lines, evals=evals, now_us=_micros(now))
    painter.paint()
    return painter.tape.account()


def fences(events: Iterable[Event]) -> tuple[CycleFence, ...]:
    """Every cycle of the ledger with the step that it resumed from, oldest first."""
    return fences_of((e.epoch, _name(e.data.get("resume_from"))) for e in events if e.kind == "cycle_started")


def _name(resume_from: object) -> str | None:
    return None if resume_from is None else str(resume_from)


def covered_step(events: Iterable[Event], cycles: tuple[CycleFence, ...]) -> int:
    """The newest step that a committed, not quarantined checkpoint holds and that no later cycle went back before."""
    committed: set[CheckpointName] = set()
    for event in events:
        name = CheckpointName.parse(str(event.data.get("name")))
        if name is not None and event.kind == "checkpoint_committed":
            committed.add(name)
        elif name is not None and event.kind == "checkpoint_quarantined":
            committed.discard(name)
    return max((name.step for name in committed if survives(name.epoch, name.step, cycles)), default=0)


# --- one clock -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Timed:
    us: int
    event: Event


def _on_one_clock(events: Sequence[Event]) -> tuple[_Timed, ...]:
    """Events on one time axis that never goes back.

    Each writer's own order is its seq, whatever its clock did (a step back is held at the last time seen); between
    writers the wall clock is all there is.
    """
    last: dict[str, int] = {}
    timed = []
    for event in sorted(events, key=lambda event: event.order):
        us = max(_micros(event.unix), last.get(event.writer, 0))
        last[event.writer] = us
        timed.append(_Timed(us, event))
    return tuple(sorted(timed, key=lambda item: (item.us, item.event.order)))


def _micros(seconds: float) -> int:
    """Whole microseconds; what is longer than any run (3,000 years) is as unknown as NaN."""
    known = finite(seconds) or 0.0
    return round(known * 1e6) if abs(known) < 1e11 else 0


def _span_us(seconds: object) -> int:
    """A duration as whole microseconds; unknown and negative ones take no time."""
    return max(0, _micros(finite(seconds) or 0.0))


# --- painting ------------------------------------------------------------------------------------------------------


class _Mode(StrEnum):
    """What the run is doing between two ledger events, outside of cycles."""

    QUEUE = "queue"
    PREFLIGHT = "preflight"
    STOPPING = "stopping"
    RECOVERY = "recovery"
    HELD = "held"
    DRAINED = "drained"
    CANCELLED = "cancelled"
    ENDED = "ended"


_COLOUR = {
    _Mode.QUEUE: Category.QUEUE,
    _Mode.PREFLIGHT: Category.PREFLIGHT,
    _Mode.STOPPING: Category.START,
    _Mode.RECOVERY: Category.RECOVERY,
    _Mode.HELD: Category.HELD,
}
_OVER = {_Mode.DRAINED, _Mode.CANCELLED, _Mode.ENDED}


class _Painter:
    """Walks the events once and paints the tape; a cycle is painted as a whole from its step lines."""

    def __init__(
        self, *, timed: tuple[_Timed, ...], lines: Iterable[StepLine], evals: Iterable[ValidationLine], now_us: int
    ) -> None:
        events = [item.event for item in timed]
        self.tape = Tape(timed[0].us if timed else None)
        self._timed = timed
        self._end_us = max(now_us, timed[-1].us) if timed else 0
        self._fences = fences(events)
        self._covered = covered_step(events, self._fences)
        self._lines = _by_epoch(lines)
        self._evals = sorted(_micros(line.unix) for line in evals)
        self._backoffs = [(t.us, t.us + _span_us(t.event.data.get("backoff_s"))) for t in timed if _waits(t.event)]
        self._ranks_per_node = _ranks_per_node(events)
        self._mode = _Mode.QUEUE

    def paint(self) -> None:
        index = 0
        while index < len(self._timed):
            item = self._timed[index]
            self._paint_gap(item)
            if item.event.kind == "cycle_started":
                index = self._paint_cycle(index)
                continue
            self._mode = _next_mode(self._mode, item.event)
            self._note_ranks(item.event)
            index += 1
        if self._timed and self._mode not in _OVER:
            self._idle_to(self._end_us)

    def _paint_gap(self, item: _Timed) -> None:
        if self._mode not in _OVER:
            self._idle_to(item.us)
        elif item.event.kind == "cycle_started" or _next_mode(self._mode, item.event) not in _OVER:
            if self._mode is _Mode.CANCELLED:
                self.tape.skip_to(item.us)
            else:
                self.tape.to(item.us, Category.DRAINED if self._mode is _Mode.DRAINED else Category.HELD)

    def _idle_to(self, us: int) -> None:
        """Paint time outside of cycles; a decided wait inside it is backoff."""
        if self._mode in (_Mode.RECOVERY, _Mode.QUEUE):
            for begin, end in self._backoffs:
                if end > self.tape.cursor and begin < us:
                    self.tape.to(min(begin, us), _COLOUR[self._mode])
                    self.tape.to(min(end, us), Category.BACKOFF)
        self.tape.to(us, _COLOUR.get(self._mode, Category.HELD))

    def _note_ranks(self, event: Event) -> None:
        if event.kind == "attempt_started":
            self.tape.ranks = _count(event.data.get("nodes")) * self._ranks_per_node
        elif event.kind == "attempt_ended":
            self.tape.ranks = 0

    def _paint_cycle(self, index: int) -> int:
        """Paint the cycle that starts at `index`; returns the index of the event that closes it."""
        started = self._timed[index].event
        close = next(
            (i for i in range(index + 1, len(self._timed)) if _closes(self._timed[i].event, started.epoch)),
            len(self._timed),
        )
        inside = self._timed[index + 1 : close]
        is_open = close == len(self._timed)
        end_us = self._end_us if is_open else self._timed[close].us
        lines = self._lines.get(started.epoch, ())
        resumed = started.data.get("resume_from") is not None
        self._paint_start(inside, lines, is_open=is_open, resumed=resumed)
        for line in lines:
            self._paint_step(line, end_us)
        incident = next((t for t in reversed(inside) if t.event.kind == "incident"), None)
        self._paint_tail(incident, end_us, is_open=is_open, trained=bool(lines))
        outcome = None if is_open else self._timed[close].event.data.get("outcome")
        clean = incident is None and outcome in _CLEAN
        self._mode = _Mode.STOPPING if clean else _Mode.RECOVERY
        return close

    def _paint_start(
        self, inside: Sequence[_Timed], lines: Sequence[StepLine], *, is_open: bool, resumed: bool
    ) -> None:
        """Start, rendezvous, restore, compile: what lies before the first step; provisional until that step is seen."""
        running = next((t for t in inside if t.event.kind == "cycle_running"), None)
        if not lines:
            return
        first = lines[0]
        first_us = _micros(first.unix) - _span_us(first.step_time_s) - _span_us(first.save_s)
        compiled_us = first_us - _span_us(first.compile_s)  # where it began
        total = max(0, compiled_us - self.tape.cursor)
        if running is None and is_open:
            self.tape.start_to(first_us)
            return
        data = running.event.data if running else {}
        start = min(total, _span_us(data["start_s"]) if finite(data.get("start_s")) else total)
        load = min(total - start, _span_us(data.get("load_s")))
        self.tape.to(self.tape.cursor + start, Category.START)
        self.tape.to(compiled_us - load, Category.RENDEZVOUS)
        self.tape.to(compiled_us, Category.RESTORE if resumed else Category.START)
        self.tape.to(first_us, Category.COMPILE)

    def _paint_step(self, line: StepLine, limit_us: int) -> None:
        self.tape.has_trained = True
        end = min(_micros(line.unix), limit_us)
        gap = max(0, end - self.tape.cursor)
        save = min(gap, _span_us(line.save_s))
        stall = min(gap - save, _span_us(line.data_wait_s))
        # step_time_s holds the wait for data; the line is written after the save.
        step = _span_us(line.step_time_s)
        if step + save < gap and self._eval_before(end) is not None:
            self.tape.to(end - save - step, Category.EVAL)
        self.tape.to(self.tape.cursor + stall, Category.DATA_STALL)
        self.tape.to(end - save, self._worth(line))
        self.tape.to(end, Category.SAVE_BLOCKING)

    def _eval_before(self, us: int) -> int | None:
        """The last evaluation that ended between the cursor and `us`."""
        return max((end for end in self._evals if self.tape.cursor < end <= us), default=None)

    def _worth(self, line: StepLine) -> Category:
        if not survives(line.epoch, line.step, self._fences):
            return Category.RECOMPUTE
        return Category.PRODUCTIVE if line.step <= self._covered else Category.PROVISIONAL

    def _paint_tail(self, incident: _Timed | None, end_us: int, *, is_open: bool, trained: bool) -> None:
        """What follows the last step of a cycle: the lost part of a step, the unnoticed fault, then the recovery."""
        if incident is not None:
            # The incident is written down once its evidence is there; it was noticed earlier.
            told = incident.event.data
            noticed = finite(told.get("detected_unix"))
            noticed_us = incident.us if noticed is None else min(_micros(noticed), incident.us)
            fault = finite(told.get("fault_unix"))
            fault_us = self.tape.cursor if fault is None else min(_micros(fault), noticed_us)
            self.tape.to(fault_us, Category.RECOMPUTE if trained else Category.START)
            self.tape.to(noticed_us, Category.HANG)
            self._mode = _Mode.RECOVERY
            self._idle_to(end_us)
        elif is_open and trained:
            self.tape.to(end_us, Category.PROVISIONAL)
        elif is_open:
            self.tape.start_to(end_us)
        else:
            self.tape.to(self._eval_before(end_us) or self.tape.cursor, Category.EVAL)
            self.tape.to(end_us, Category.START)


def _by_epoch(lines: Iterable[StepLine]) -> dict[Epoch, list[StepLine]]:
    grouped: dict[Epoch, list[StepLine]] = {}
    for line in lines:
        grouped.setdefault(line.epoch, []).append(line)
    for group in grouped.values():
        group.sort(key=lambda line: line.step)
    return grouped


def _waits(event: Event) -> bool:
    return event.kind == "decision" and _span_us(event.data.get("backoff_s")) > 0


def _closes(event: Event, epoch: Epoch) -> bool:
    if event.kind in ("cycle_ended", "cycle_started"):
        return event.kind == "cycle_started" or event.epoch == epoch
    return event.kind in _CLOSES_CYCLE


_PARKED = {"drained": _Mode.DRAINED, "cancelled": _Mode.CANCELLED}
_OUTCOMES = {**_PARKED, "done": _Mode.ENDED, "failed": _Mode.ENDED, "held": _Mode.HELD}


def _next_mode(mode: _Mode, event: Event) -> _Mode:
    """The mode after `event`. An ended run stays ended until someone resumes it or an attempt begins."""
    match event.kind:
        case "attempt_intent" | "attempt_submitted" | "resumed":
            return _Mode.QUEUE
        case "attempt_started":
            return _Mode.PREFLIGHT
        case "run_done" | "run_failed":
            return _Mode.ENDED
        case "run_held":
            # Drained and cancelled runs are parked at a person's word: nobody keeps them waiting.
            return _PARKED.get(str(event.data.get("rule")), _Mode.HELD)
    if mode in _OVER:
        return mode
    match event.kind:
        case "attempt_ended":
            return _OUTCOMES.get(str(event.data.get("outcome")), _Mode.QUEUE)
        case "incident" if mode is not _Mode.HELD:
            return _Mode.RECOVERY
        case _:
            return mode


def _count(nodes: object) -> int:
    if isinstance(nodes, list | tuple):
        return len(nodes)
    return nodes if isinstance(nodes, int) and nodes > 0 else 0


def _ranks_per_node(events: Iterable[Event]) -> int:
    for event in events:
        world = event.data.get("world_size")
        nodes = _count(event.data.get("nodes"))
        if event.kind in ("run_created", "cycle_started") and isinstance(world, int) and nodes:
            return max(1, world // nodes)
    return 1
