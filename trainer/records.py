"""The trainer's side of the contract (configs/schema/): one record read, three records written.

    cycle.json          ──▶ Cycle            what this launch is and where it resumes (supervisor → ranks)
    outcomes/rank-N.json ◀── Outcome         how this rank ended, in its own words
    train.jsonl         ◀── TrainLine        one line per step, rank 0
    validation.jsonl    ◀── ValidationLine   one line per validation pass, rank 0

Records are flat JSON with `schema_version`. A reader ignores fields it does not know and refuses another major
version. Floats are written by repr, so that a loss read back is the same float; JSON has no NaN, so a number that is
not finite is null and the record says `"nonfinite": true`.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

from trainer.fsio import RecordUnreadable

SCHEMA_VERSION = 1

EPOCH_TEXT = re.compile(r"a(\d{4,})g(\d{2,})c(\d{4,})")
CHECKPOINT_NAME = re.compile(r"step-(\d{9,})\.(a\d{4,}g\d{2,}c\d{4,})")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Epoch:
    """Which launch: (attempt, generation, cycle), ordered as the tuple. All from 1; 0 = launched without pawl."""

    attempt: int
    generation: int
    cycle: int

    @property
    def text(self) -> str:
        """`a0003g01c0002`, the form that stands in file names."""
        return f"a{self.attempt:04d}g{self.generation:02d}c{self.cycle:04d}"

    @classmethod
    def parse(cls, text: str) -> "Epoch":
        """The epoch of its text form. Raises ValueError."""
        match = EPOCH_TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no epoch; one looks like a0003g01c0002")
        attempt, generation, cycle = map(int, match.groups())
        return cls(attempt=attempt, generation=generation, cycle=cycle)


UNSUPERVISED = Epoch(attempt=0, generation=0, cycle=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """One launch of the ranks, as the supervisor wrote it before they started."""

    run: str
    epoch: Epoch
    resume_from: str | None
    skip_windows: tuple[tuple[int, int], ...]
    world_size: int
    ranks_per_node: int
    num_nodes: int
    beat_interval_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExceptionFacts:
    """What Python knew about the exception that ended a rank; `frame` is the innermost one, `file:line in function`."""

    type: str
    message: str
    frame: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a rank ended under its own control. `step` = completed steps; the step that failed is step + 1.

    `suspects`: ranks that this one, and all others, take for the cause.
    """

    rank: int
    node: str
    epoch: Epoch
    kind: str
    exit_code: int
    step: int
    phase: str
    message: str
    exception: ExceptionFacts | None
    checkpoint: str | None
    bad_file: str | None
    suspects: tuple[int, ...] = ()
    written_unix: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainLine:
    """One completed step. Seconds are wall seconds; `tokens` and `consumed_samples` count from the start of the run.

    `grad_norms`: by block (model.layers.0 …), where they were asked for. `compile_s`: spent before this step, the
    first of its launch.
    """

    step: int
    epoch: str
    consumed_samples: int
    tokens: int
    loss: float | None
    grad_norm: float | None
    lr: float
    num_valid: int
    step_time_s: float
    data_wait_s: float
    tokens_per_s: float
    model_flops: float
    mfu: float | None
    mfu_full_attn: float | None
    mfu_megatron: float | None
    hfu: float | None
    skipped: str | None
    compile_s: float | None = None
    save_s: float | None
    grad_norms: Mapping[str, float] | None = None
    unix: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLoss:
    """The held-out loss of one source, named as in the config; NaN where its set has no label."""

    source: str
    loss: float
    num_valid: int
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationLine:
    """One pass over the fixed held-out sets; `loss` is the mean over all `num_valid` labels of all sources."""

    step: int
    loss: float
    num_valid: int
    num_samples: int
    sources: tuple[SourceLoss, ...] = ()
    unix: float


def to_json(record: Outcome | TrainLine | ValidationLine) -> str:
    """One line of JSON, without the newline. The same record gives the same text."""
    assert is_dataclass(record)
    values, nonfinite = _finite(asdict(record))
    body = {"schema_version": SCHEMA_VERSION, **values}
    if nonfinite:
        body["nonfinite"] = True
    return json.dumps(body, ensure_ascii=False, allow_nan=False)


def _finite(values: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """`values` with null for each float JSON cannot hold, and whether there was one at the top."""
    bad = {key for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    return {key: None if key in bad else _finite_rows(value) for key, value in values.items()}, bool(bad)


def _finite_rows(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _finite(value)[0]
    return [_finite_rows(row) for row in value] if isinstance(value, tuple) else value


def parse_cycle(body: Mapping[str, object]) -> Cycle:
    """The Cycle in a cycle.json. Raises RecordUnreadable naming the field that is missing or of the wrong kind."""
    if body.get("schema_version") != SCHEMA_VERSION:
        raise RecordUnreadable(f"cycle.json: schema_version {body.get('schema_version')!r}, this trainer reads 1.")
    epoch = _field(body, "epoch", dict)
    resume_from = body.get("resume_from")
    if resume_from is not None and not (isinstance(resume_from, str) and CHECKPOINT_NAME.fullmatch(resume_from)):
        raise RecordUnreadable(f"cycle.json: resume_from {resume_from!r} is no checkpoint name.")
    return Cycle(
        run=_field(body, "run", str),
        epoch=Epoch(**{field.name: _field(epoch, field.name, int) for field in fields(Epoch)}),
        resume_from=resume_from,
        skip_windows=parse_windows(_field(body, "skip_windows", list)),
        world_size=_field(body, "world_size", int),
        ranks_per_node=_field(body, "ranks_per_node", int),
        num_nodes=len(_field(body, "nodes", list)),
        beat_interval_s=float(_field(body, "beat_interval_s", int, float)),
    )


def parse_windows(windows: Iterable[object]) -> tuple[tuple[int, int], ...]:
    """Skip windows as (first_step, last_step), both skipped. Raises RecordUnreadable on an empty or odd one."""
    parsed = []
    for window in windows:
        match window:
            case [int(first), int(last)] if 1 <= first <= last:
                parsed.append((first, last))
            case _:
                raise RecordUnreadable(f"cycle.json: skip window {window!r} is not [first_step, last_step].")
    return tuple(parsed)


def _field(body: Mapping[str, Any], name: str, *kinds: type) -> Any:
    """A field that must be there, of one of `kinds`; bool is not an int here."""
    value = body.get(name)
    if not isinstance(value, kinds) or isinstance(value, bool):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise RecordUnreadable(f"cycle.json: {name} is {value!r}, expected {expected}.")
    return value
