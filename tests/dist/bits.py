"""What must not change a bit, as a table: two plays of the oracle whose losses and weights are equal in fp32 and bf16.

    pipeline stages and schedules   stages sum micro-batches in rising order; tie sites have buffers of their own
    recomputation                   the same kernels on the same numbers, later
    ZeRO 0 and 1, bucket sizes      reduce-scatter sums in rank order, whatever lies in a bucket
    resume, validation              nothing of a run lives outside its checkpoint; a validation pass leaves no trace

Gradient norms are sums of fp64 numbers in another order, so those are equal to 1e-14 instead; clipping by them is not
seen in fp32, where gradients are in both.
"""

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from dist.axes import Case, Value
from dist.case import batch_of, live_weights, local_batch, make_engine, train
from dist.pool import Pool, Ranks

from trainer.checkpoint.load import load_checkpoint
from trainer.checkpoint.saver import save_checkpoint
from trainer.checkpoint.state import RunState
from trainer.engine import Engine, StepResult

STEPS = 4
NORM_BAR = 1e-14


class How(StrEnum):
    """How the steps of a case are made."""

    STRAIGHT = "straight"
    RESUMED = "resumed"  # saved in the middle, loaded by an engine made anew
    EVALUATED = "evaluated"  # a validation pass after every step


@dataclass(frozen=True, slots=True)
class Play:
    """A case and how it is run."""

    case: Case
    how: How = How.STRAIGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """`play` changes one thing about a case where `applies`, and changes no bit."""

    name: str
    applies: Callable[[Case], bool]
    play: Callable[[Case], Play]


# Neither several stages a rank nor layers shared out by hand, which are made for one schedule.
PLAIN: dict[str, Value] = {"schedule": "1f1b", "virtual": None, "split": None}

RELATIONS = (
    Relation(name="one-stage", applies=lambda c: c.pp > 1, play=lambda c: Play(c.but(pp=1, **PLAIN))),
    Relation(name="1f1b", applies=lambda c: c["schedule"] != "1f1b", play=lambda c: Play(c.but(**PLAIN))),
    Relation(name="kept", applies=lambda c: c["recompute"] != "none", play=lambda c: Play(c.but(recompute="none"))),
    Relation(name="zero-1", applies=lambda c: c["zero"] == 0, play=lambda c: Play(c.but(zero=1))),
    Relation(name="bucket-4096", applies=lambda c: c["bucket"] != 4096, play=lambda c: Play(c.but(bucket=4096))),
    Relation(name="resumed", applies=lambda c: True, play=lambda c: Play(c, How.RESUMED)),
    Relation(name="evaluated", applies=lambda c: True, play=lambda c: Play(c, How.EVALUATED)),
)


@dataclass(frozen=True, slots=True)
class Twins:
    """One line of the table for one case; `str` names it on a command line."""

    relation: Relation
    case: Case

    def __str__(self) -> str:
        return f"{self.case}~{self.relation.name}"


def twins_of(cases: Iterable[Case]) -> tuple[Twins, ...]:
    """Every relation that applies to each case, in fp32 or, where the case says so, bf16."""
    bases = [case if case["dtype"] == "bfloat16" else case.but(dtype="float32") for case in cases]
    return tuple(Twins(relation, case) for case in bases for relation in RELATIONS if relation.applies(case))


def parse_twins(text: str) -> Twins:
    """The inverse of `str`. Raises ValueError."""
    case, _, name = text.partition("~")
    for relation in RELATIONS:
        if relation.name == name:
            return Twins(relation, Case.parse(case))
    raise ValueError(f"{text!r} names no relation; there are {', '.join(r.name for r in RELATIONS)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bits:
    """Losses and norms of the steps; digests of (canonical name, tp rank), which all holders must share."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    digests: dict[tuple[str, int], str]
    faults: tuple[str, ...]


class Player:
    """Runs plays and keeps what they gave: most relations share their left side."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._known: dict[Play, Bits] = {}

    def bits(self, play: Play) -> Bits:
        if play not in self._known:
            with tempfile.TemporaryDirectory() as folder:
                runs = self.pool.run(play.case.topology, run_play, play.case, play.how, folder)
            self._known[play] = _merge(play.case, runs)
        return self._known[play]

    def faults(self, twins: Twins) -> tuple[str, ...]:
        """Where the two differ; () is right."""
        one, other = self.bits(Play(twins.case)), self.bits(twins.relation.play(twins.case))
        return (*one.faults, *other.faults, *_differences(one, other))


def _differences(one: Bits, other: Bits) -> Iterator[str]:
    for step, (a, b) in enumerate(zip(one.losses, other.losses, strict=True)):
        if a != b:
            yield f"loss of step {step}: {a!r} and {b!r}"
    for step, (a, b) in enumerate(zip(one.norms, other.norms, strict=True)):
        if not abs(a - b) <= NORM_BAR * abs(a):
            yield f"gradient norm of step {step}: {a!r} and {b!r}"
    changed = sorted(name for name, _ in one.digests.items() ^ other.digests.items())
    if changed:
        yield f"bits differ in {len(changed) // 2} local tensors, first {changed[0]}"


def _merge(case: Case, runs: list[tuple[list[StepResult], dict[str, str]]]) -> Bits:
    digests: dict[tuple[str, int], str] = {}
    faults = []
    for rank, (_, mine) in enumerate(runs):
        for name, digest in mine.items():
            if digests.setdefault((name, case.topology.coord(rank).tp), digest) != digest:
                faults.append(f"{name} on rank {rank} is not that of the other ranks that hold it")
    steps = runs[0][0]
    losses, norms = tuple(step.loss for step in steps), tuple(step.grad_norm for step in steps)
    return Bits(losses=losses, norms=norms, digests=digests, faults=tuple(faults))


def run_play(ranks: Ranks, case: Case, how: How, folder: str) -> tuple[list[StepResult], dict[str, str]]:
    """On a rank: (results of STEPS steps, name → digest of the live local weight)."""
    engine = make_engine(ranks, case)
    results: list[StepResult] = []
    for step in range(STEPS):
        if how is How.RESUMED and step == STEPS // 2:
            engine = _reloaded(ranks, engine, case, step, Path(folder))
        results += train(engine, case, [step])
        if how is How.EVALUATED:
            total, counted = engine.eval_loss(local_batch(case, 99, engine.ctx.get_dp_rank()))
            assert total > 0 and counted == int((batch_of(case, 99)[1] != -100).sum())
    digests = {name: hashlib.sha256(w.tobytes()).hexdigest() for name, w in live_weights(engine).items()}
    return results, digests


def _reloaded(ranks: Ranks, engine: Engine, case: Case, step: int, folder: Path) -> Engine:
    state = RunState(step=step, consumed_samples=0, consumed_tokens=0, adam_t=step, skip_windows=())
    saved = save_checkpoint(
        engine, state, checkpoints_dir=folder, epoch="a0001g01c0001", run="test", config_text="general: {}\n",
        tokenizer=None,
    )  # fmt: skip
    fresh = make_engine(ranks, case)
    for storage in fresh.optimizer.storages:
        storage.weights.fill_(float("nan"))
    assert load_checkpoint(folder / saved.name, fresh) == state
    return fresh
