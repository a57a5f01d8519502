"""run directory → RunView: one truth for status, watch, report, explain, serve and the metrics.

    read_run(paths, now) ── RunInputs ──▶ build_view (pure) ──▶ RunView

`build_view` decides nothing about the run; it says what the records say. What they do not say is None.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.state.counting import Counting, CycleFence, survives
from orchestrator.state.history import replay
from orchestrator.state.records import Cycle, Event, LaunchFacts, Request
from orchestrator.state.train_lines import MergedSteps, StepLine, ValidationLine, merge_steps
from orchestrator.views.copies import copies_of
from orchestrator.views.goodput import account, fences
from orchestrator.views.goodput_tape import Category
from orchestrator.views.human import harmless_data
from orchestrator.views.parts import (
    attempts_of,
    checkpoints_of,
    cycles_of,
    decisions_of,
    incidents_of,
    lineage_of,
    nodes_of,
    requests_of,
    state_of,
    stop_of,
)
from orchestrator.views.records import GoodputView, MeshView, NodeBeat, ProgressView, RunState, RunView

RECENT_STEPS = 20
MIN_STALE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """Everything read from a run directory at `now` (seconds since 1970), nothing interpreted yet."""

    now: float
    run_dir: str
    facts: LaunchFacts | None = None
    events: tuple[Event, ...] = ()
    lines: tuple[StepLine, ...] = ()
    validation: tuple[ValidationLine, ...] = ()
    counting: Counting = field(default_factory=Counting)
    cycle: Cycle | None = None
    beats: tuple[NodeBeat, ...] = ()
    supervisor_alive: bool | None = None
    requests: tuple[Request, ...] = ()
    targets: tuple[str, ...] = ()
    profiles: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def run_view(run_dir: Path, *, now: float | None = None) -> RunView:
    """Read a run directory and build its view. Never raises for what is missing or damaged: `problems` names it."""
    from orchestrator.views.read import read_run

    return build_view(read_run(run_dir, now))


def to_json(view: RunView) -> dict[str, Any]:
    """The view as plain JSON data."""
    return asdict(view)


def build_view(inputs: RunInputs) -> RunView:
    """What the inputs say, as one record, with every text such that a terminal only shows it. Pure."""
    history = replay(inputs.events)
    decisions = decisions_of(inputs.events)
    state, reason = state_of(history, inputs.events, inputs.supervisor_alive, inputs.unread)
    facts = inputs.facts
    created = next((event for event in inputs.events if event.kind == "run_created"), None)
    said: dict[str, Any] = created.data if created else {}
    book = account(inputs.events, inputs.lines, inputs.now, evals=inputs.validation)
    world_size = history.world_size or (facts.world_size if facts else None)
    view = RunView(
        now_unix=inputs.now,
        run=history.run or (facts.run if facts else Path(inputs.run_dir).name),
        run_dir=inputs.run_dir,
        project=facts.project if facts else None,
        state=state,
        state_reason=reason,
        stop=stop_of(history, state),
        launcher=said.get("launcher"),
        by=said.get("by"),
        created_unix=created.unix if created else None,
        ended_unix=book.end_unix if state in _ENDED else None,
        world_size=world_size,
        mesh=MeshView(dp=facts.dp, pp=facts.pp, tp=facts.tp, cp=facts.cp) if facts else None,
        num_params=facts.num_params if facts else None,
        tokens_per_step=facts.tokens_per_step if facts else None,
        compute_dtype=facts.compute_dtype if facts else None,
        supervisor_alive=inputs.supervisor_alive,
        progress=_progress(inputs, state),
        attempts=attempts_of(history, inputs.events),
        cycles=cycles_of(history, inputs.events),
        nodes=nodes_of(inputs.events, inputs.cycle, inputs.beats, world_size=world_size, running=not state.is_over),
        checkpoints=checkpoints_of(inputs.counting, inputs.events),
        incidents=incidents_of(history, inputs.events, decisions),
        decisions=decisions,
        requests=requests_of(inputs.requests, inputs.events),
        goodput=GoodputView(
            wall_s=book.wall_s,
            seconds={str(category): book.seconds(category) for category in Category},
            rank_seconds={str(category): book.rank_seconds(category) for category in Category},
            productive_ratio=book.productive_ratio,
            ettr=book.ettr,
        ),
        metrics_addresses=inputs.targets,
        profiles=inputs.profiles,
        problems=inputs.problems,
        lineage=lineage_of(inputs.events),
        copies=copies_of(inputs.events),
    )
    return harmless_data(view)


_ENDED = {RunState.DONE, RunState.DRAINED, RunState.FAILED, RunState.CANCELLED}


def run_steps(lines: Sequence[StepLine], events: Sequence[Event]) -> MergedSteps:
    """The run as it stands and what was trained again or thrown away by a later cycle that resumed from before it."""
    cycles = fences(events)
    merged = merge_steps(lines)
    fenced = {line.epoch for line in merged.kept if _is_fenced(line.epoch, cycles)}
    kept = tuple(line for line in merged.kept if line.epoch not in fenced or survives(line.epoch, line.step, cycles))
    dropped = tuple(
        line for line in merged.kept if line.epoch in fenced and not survives(line.epoch, line.step, cycles)
    )
    recomputed = sorted((*merged.recomputed, *dropped), key=lambda line: (line.step, line.epoch))
    return MergedSteps(kept=kept, recomputed=tuple(recomputed))


def _is_fenced(epoch: object, cycles: Sequence[CycleFence]) -> bool:
    return bool(cycles) and epoch != cycles[-1].epoch


def _progress(inputs: RunInputs, state: RunState) -> ProgressView:
    merged = run_steps(inputs.lines, inputs.events)
    cycles = fences(inputs.events)
    newest = cycles[-1] if cycles else None
    recent = [line for line in merged.kept[-RECENT_STEPS:] if newest is None or line.epoch == newest.epoch]
    last = merged.kept[-1] if merged.kept else None
    age = inputs.now - last.unix if last else None
    usual = _median([line.step_time_s for line in recent])
    stale = state is not RunState.TRAINING or age is None or age > max(MIN_STALE_S, 5 * (usual or 0.0))
    step = last.step if last else (newest.resume_step if newest else None)
    train_steps = inputs.facts.train_steps if inputs.facts else None
    validation = inputs.validation[-1] if inputs.validation else None
    return ProgressView(
        step=step,
        train_steps=train_steps,
        tokens=last.tokens if last else None,
        loss=last.loss if last else None,
        grad_norm=last.grad_norm if last else None,
        lr=last.lr if last else None,
        tokens_per_s=_median([line.tokens_per_s for line in recent]),
        step_time_s=usual,
        mfu=_median([line.mfu for line in recent]),
        mfu_full_attn=_median([line.mfu_full_attn for line in recent]),
        mfu_megatron=_median([line.mfu_megatron for line in recent]),
        validation_loss=validation.loss if validation else None,
        measured_unix=last.unix if last else None,
        stale=stale,
        eta_s=None if stale else _eta(recent, step, train_steps),
        skipped_steps=sum(line.skipped is not None for line in merged.kept),
        nonfinite_steps=sum(line.nonfinite for line in merged.kept),
        recomputed_steps=len(merged.recomputed),
    )


def _eta(recent: Sequence[StepLine], step: int | None, train_steps: int | None) -> float | None:
    """Seconds to the last step at the pace of the recent steps, saves included; None while no pace is known."""
    if step is None or train_steps is None or len(recent) < 2:
        return None
    pace = (recent[-1].unix - recent[0].unix) / (recent[-1].step - recent[0].step)
    return max(0.0, pace * (train_steps - step))


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
