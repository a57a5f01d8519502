"""The lines of train.jsonl and validation.jsonl, as the surfaces read them.

Rank 0 appends one line a step; a kill can tear the last one, and a cycle after a rollback trains some steps again.
So reading is tolerant (a line that is not whole JSON is counted and left out, never guessed) and merging follows one
rule: for each step the line of the *last* epoch is what the run is, all earlier ones are work that was done again.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.state.epochs import Epoch
from orchestrator.state.records import SCHEMA_VERSION, Unreadable, parse


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """One completed optimizer step. Tokens and samples are cumulative; times in seconds; None is unknown."""

    step: int
    epoch: Epoch
    unix: float
    loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    tokens: int | None = None
    consumed_samples: int | None = None
    num_valid: int | None = None
    step_time_s: float | None = None
    data_wait_s: float | None = None
    save_s: float | None = None
    compile_s: float | None = None
    grad_norms: dict[str, float | None] | None = None
    tokens_per_s: float | None = None
    model_flops: float | None = None
    mfu: float | None = None
    mfu_full_attn: float | None = None
    mfu_megatron: float | None = None
    skipped: str | None = None
    nonfinite: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationLine:
    """Held-out loss after `step` updates."""

    step: int
    epoch: Epoch
    unix: float
    loss: float | None
    num_samples: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStep:
    """One line of train.jsonl (rank 0). Numbers that are not finite are None with `nonfinite` set."""

    schema_version: int = SCHEMA_VERSION
    step: int
    epoch: str
    consumed_samples: int
    tokens: int
    loss: float | None
    grad_norm: float | None
    lr: float | None
    num_valid: int
    step_time_s: float
    data_wait_s: float
    tokens_per_s: float
    model_flops: float
    mfu: float | None = None
    mfu_full_attn: float | None = None
    mfu_megatron: float | None = None
    hfu: float | None = None
    skipped: str | None = None
    save_s: float | None = None
    compile_s: float | None = None
    grad_norms: dict[str, float] | None = None
    nonfinite: bool = False
    unix: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePoint:
    """The held-out loss of one source; None where its set has no label."""

    source: str
    loss: float | None
    num_valid: int
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationPoint:
    """One line of validation.jsonl."""

    schema_version: int = SCHEMA_VERSION
    step: int
    loss: float | None
    num_valid: int
    num_samples: int
    sources: tuple[SourcePoint, ...] = ()
    unix: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedSteps:
    """The run as it stands, and the steps that were trained more than once. Both ascending by step, then by epoch."""

    kept: tuple[StepLine, ...]
    recomputed: tuple[StepLine, ...]


def merge_steps(lines: Iterable[StepLine]) -> MergedSteps:
    """For each step the last epoch's line counts (the last one written, within an epoch); the rest was recomputed."""
    newest: dict[int, StepLine] = {}
    recomputed: list[StepLine] = []
    for line in lines:
        held = newest.get(line.step)
        if held is None:
            newest[line.step] = line
        elif line.epoch >= held.epoch:
            recomputed.append(held)
            newest[line.step] = line
        else:
            recomputed.append(line)
    return MergedSteps(
        kept=tuple(newest[step] for step in sorted(newest)),
        recomputed=tuple(sorted(recomputed, key=lambda line: (line.step, line.epoch))),
    )


def last_written_step(lines: Iterable[str]) -> int | None:
    """The step of the last whole line, None when there is none. `lines`: the end of a train.jsonl, first may be cut."""
    whole, _ = _records("".join(f"{line}\n" for line in lines))
    steps = [step for record in whole if isinstance(step := record.get("step"), int)]
    return steps[-1] if steps else None


def parse_train_step(text: str | None) -> TrainStep | Unreadable:
    return parse(TrainStep, text)


def parse_validation_point(text: str | None) -> ValidationPoint | Unreadable:
    return parse(ValidationPoint, text)


def parse_step_lines(text: str, *, epoch: Epoch) -> tuple[tuple[StepLine, ...], int]:
    """(lines, number of lines that cannot be read). `epoch` is the directory's, used where a line names none.

    A last line without its line feed is a write in progress: it is left out and not counted as unreadable.
    """
    records, unreadable = _records(text)
    lines = []
    for record in records:
        line = _step_line(record, epoch)
        if line is None:
            unreadable += 1
        else:
            lines.append(line)
    return tuple(lines), unreadable


def parse_validation_lines(text: str, *, epoch: Epoch) -> tuple[tuple[ValidationLine, ...], int]:
    """(lines, number of lines that cannot be read), as parse_step_lines."""
    records, unreadable = _records(text)
    lines = []
    for record in records:
        step, unix = _whole(record.get("step")), finite(record.get("unix"))
        if step is None or unix is None:
            unreadable += 1
            continue
        lines.append(
            ValidationLine(
                step=step,
                epoch=epoch,
                unix=unix,
                loss=finite(record.get("loss")),
                num_samples=_whole(record.get("num_samples")),
            )
        )
    return tuple(lines), unreadable


def finite(value: object) -> float | None:
    """A finite float of a JSON number; None for everything else (null, NaN, ±Inf, text, booleans)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _records(text: str) -> tuple[list[dict[str, object]], int]:
    records: list[dict[str, object]] = []
    unreadable = 0
    *whole_lines, _torn = text.split("\n")
    for raw in whole_lines:
        if not raw.strip():
            continue
        try:
            record = json.loads(raw)
        except (ValueError, RecursionError):
            unreadable += 1
            continue
        if isinstance(record, dict) and record.get("schema_version", 1) == 1:
            records.append(record)
        else:
            unreadable += 1
    return records, unreadable


def _step_line(record: dict[str, object], epoch: Epoch) -> StepLine | None:
    step, unix = _whole(record.get("step")), finite(record.get("unix"))
    if step is None or unix is None:
        return None
    named = record.get("epoch")
    skipped, norms = record.get("skipped"), record.get("grad_norms")
    return StepLine(
        step=step,
        epoch=(Epoch.parse(named) if isinstance(named, str) else None) or epoch,
        unix=unix,
        loss=finite(record.get("loss")),
        grad_norm=finite(record.get("grad_norm")),
        lr=finite(record.get("lr")),
        tokens=_whole(record.get("tokens")),
        consumed_samples=_whole(record.get("consumed_samples")),
        num_valid=_whole(record.get("num_valid")),
        step_time_s=finite(record.get("step_time_s")),
        data_wait_s=finite(record.get("data_wait_s")),
        save_s=finite(record.get("save_s")),
        grad_norms={str(name): finite(norm) for name, norm in norms.items()} if isinstance(norms, dict) else None,
        compile_s=finite(record.get("compile_s")),
        tokens_per_s=finite(record.get("tokens_per_s")),
        model_flops=finite(record.get("model_flops")),
        mfu=finite(record.get("mfu")),
        mfu_full_attn=finite(record.get("mfu_full_attn")),
        mfu_megatron=finite(record.get("mfu_megatron")),
        skipped=skipped if isinstance(skipped, str) else None,
        nonfinite=record.get("nonfinite") is True,
    )
