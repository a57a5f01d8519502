"""Rules about the optimizer and what changes over a run: learning rate, weight decay, groups, batch size."""

import itertools
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from trainer.optim.groups import useless
from trainer.pipeline.partition import is_schedule_file
from trainer.schedules import CONSTANT, decay_start, decay_steps, lr_at, weight_decay_steps
from trainer.spec import EMBEDDING, HEAD, parameter_names

from .problems import Severity, nearest, quoted
from .rules import Finding, Given, Rule

RATE = "optimizer.learning_rate_scheduler"
DECAY = "optimizer.weight_decay_schedule"
RAMP = "tokens.batch_size_ramp"

LAYER = re.compile(r"\.\d+\.")


def rate_order(c: Any, given: Given) -> Iterator[Finding]:
    rate = c.optimizer.learning_rate_scheduler
    if rate.min_decay_lr > rate.learning_rate:
        message = f"higher than learning_rate = {rate.learning_rate:g}"
        found = f"{rate.min_decay_lr:g}"
        yield Finding(key=f"{RATE}.min_decay_lr", message=message, found=found, expected="at most that")
    if decay_start(rate) < rate.lr_warmup_steps:
        message = f"the decay would start inside the warm-up of {rate.lr_warmup_steps} steps"
        found = str(rate.lr_decay_starting_step)
        key = f"{RATE}.lr_decay_starting_step"
        yield Finding(key=key, message=message, found=found, expected=f"at least {rate.lr_warmup_steps}")


def rate_reaches_its_floor(c: Any, given: Given) -> Iterator[Finding]:
    """A decay that outlasts the run never arrives; a common slip is to forget that warm-up comes before it."""
    rate, steps = c.optimizer.learning_rate_scheduler, c.tokens.train_steps
    end = decay_start(rate) + decay_steps(rate, train_steps=steps)
    final = lr_at(steps, rate, train_steps=steps)
    if rate.lr_warmup_steps >= steps:
        message = f"the warm-up lasts as long as the run: the last step has a learning rate of {final:.4g}"
        found = f"{rate.lr_warmup_steps} of {steps} steps"
        key = f"{RATE}.lr_warmup_steps"
        yield Finding(key=key, message=message, found=found, severity=Severity.WARNING)
    elif end > steps and rate.lr_decay_style != CONSTANT:
        key = f"{RATE}.lr_decay_steps" if given(f"{RATE}.lr_decay_steps") else f"{RATE}.lr_decay_starting_step"
        left = max(0, steps - decay_start(rate))
        yield Finding(
            key=key,
            message=f"the decay ends at step {end:,}, after the last step {steps:,}: it stops at a learning rate of "
            f"{final:.4g}, above min_decay_lr = {rate.min_decay_lr:.4g}",
            found=str(decay_steps(rate, train_steps=steps)),
            expected=f"at most {left}",
            severity=Severity.WARNING,
        )


def constant_rate_has_no_decay(c: Any, given: Given) -> Iterator[Finding]:
    """Keys of a decay beside the constant style: one of the two was not meant."""
    if c.optimizer.learning_rate_scheduler.lr_decay_style != CONSTANT:
        return
    for name in ("lr_decay_steps", "lr_decay_starting_step", "min_decay_lr"):
        if getattr(c.optimizer.learning_rate_scheduler, name):
            message = "without effect: lr_decay_style is constant, so the rate never decays"
            expected = "no such key, or lr_decay_style linear, cosine or 1-sqrt"
            yield Finding(key=f"{RATE}.{name}", message=message, expected=expected, severity=Severity.WARNING)


def weight_decay_arrives(c: Any, given: Given) -> Iterator[Finding]:
    """A change of weight decay that outlasts the run stops on its way."""
    schedule, steps = c.optimizer.weight_decay_schedule, c.tokens.train_steps
    if schedule is None:
        return
    end = schedule.starting_step + weight_decay_steps(schedule, train_steps=steps)
    if schedule.starting_step >= steps:
        message = f"the change of weight decay starts after the last step {steps:,}: it never happens"
        key, found = f"{DECAY}.starting_step", str(schedule.starting_step)
        yield Finding(key=key, message=message, found=found, severity=Severity.WARNING)
    elif end > steps:
        message = f"the change of weight decay ends at step {end:,}, after the last step {steps:,}"
        expected = f"at most {steps - schedule.starting_step}"
        key, found = f"{DECAY}.steps", str(schedule.steps)
        yield Finding(key=key, message=message, found=found, expected=expected, severity=Severity.WARNING)


def ramp_is_legal(c: Any, given: Given) -> Iterator[Finding]:
    """From 0, rising in samples and in size, whole micro-batches for every dp rank, up to the full batch."""
    ramp = c.tokens.batch_size_ramp
    if ramp is None:
        return
    if ramp[0].from_samples:
        found = str(ramp[0].from_samples)
        yield Finding(key=f"{RAMP}.0.from_samples", message="nothing says how large the first batch is", found=found,
                      expected="0")  # fmt: skip
    for index, (before, entry) in enumerate(itertools.pairwise(ramp), start=1):
        for name in ("from_samples", "global_batch_size"):
            least, value = getattr(before, name), getattr(entry, name)
            if value <= least:
                key, expected = f"{RAMP}.{index}.{name}", f"more than the {least} of the entry before"
                yield Finding(key=key, message="a ramp goes up", found=str(value), expected=expected)
    yield from _whole_micro_batches(c)


def _whole_micro_batches(c: Any) -> Iterator[Finding]:
    ramp, dp, size = c.tokens.batch_size_ramp, c.parallelism.dp, c.tokens.micro_batch_size
    unit = dp * size
    full = unit * c.tokens.batch_accumulation_per_replica
    what = f"micro_batch_size {size} · dp {dp} = {unit}"
    for index, entry in enumerate(ramp):
        key, value = f"{RAMP}.{index}.global_batch_size", entry.global_batch_size
        below, above = value // unit * unit, -(-value // unit) * unit
        if below != above:
            expected = f"{below} or {above}" if below else str(above)
            message = f"not a multiple of {what}, the samples of one micro-batch on all dp ranks"
            yield Finding(key=key, message=message, found=str(value), expected=expected)
        elif index == len(ramp) - 1 and value != full:
            message = f"the ramp must end at the full batch, batch_accumulation_per_replica · {what}"
            expected = f"{full}, or batch_accumulation_per_replica: {value // unit}"
            yield Finding(key=key, message=message, found=str(value), expected=expected)


def ramp_has_a_named_schedule(c: Any, given: Given) -> Iterator[Finding]:
    """A schedule file is one list of actions, for one number of micro-batches."""
    name = c.parallelism.pp_engine
    if c.tokens.batch_size_ramp is not None and len(c.tokens.batch_size_ramp) > 1 and is_schedule_file(name):
        message = f"the schedule file {name} is made for one number of micro-batches, and a ramp has several"
        yield Finding(key=RAMP, message=message, expected="no ramp, or a schedule by name in parallelism.pp_engine")


def ramp_ends_in_the_run(c: Any, given: Given) -> Iterator[Finding]:
    """An entry that no step reaches."""
    ramp = c.tokens.batch_size_ramp
    if ramp is not None and ramp[-1].from_samples >= c.train_samples:
        message = f"never reached: the whole run has {c.train_samples:,} samples in {c.tokens.train_steps:,} steps"
        key, found = f"{RAMP}.{len(ramp) - 1}.from_samples", str(ramp[-1].from_samples)
        yield Finding(key=key, message=message, found=found, severity=Severity.WARNING)


def groups_have_parameters(c: Any, given: Given) -> Iterator[Finding]:
    """A pattern that decides about nothing is a slip: what it was to keep from decay would decay."""
    groups = c.optimizer.groups
    if not groups:
        return
    names = parameter_names(c)
    for index, is_taken in useless(groups, names).items():
        key, match = f"optimizer.groups.{index}.match", groups[index].match
        if is_taken:
            message = "never used: earlier groups take all parameters that fit, and the first that fits decides"
            yield Finding(key=key, message=message, found=quoted(match), expected="the narrower pattern first")
        elif HEAD not in names and fnmatchcase(HEAD, match):
            message = f"no such parameter: with tie_word_embeddings the head's weight is {EMBEDDING}"
            yield Finding(key=key, message=message, found=quoted(match))
        else:
            yield Finding(key=key, message="fits no parameter", found=quoted(match), expected=_near_names(match, names))


def _near_names(match: str, names: Sequence[str]) -> str:
    """The parameter or the part of names nearest to a pattern, else one name of each kind."""
    parts = {part for name in names for part in name.split(".") if not part.isdecimal()} - {"model", "weight"}
    near = nearest(match.strip("*.?"), {*names, *parts})
    kinds = dict.fromkeys(LAYER.sub(".*.", name) for name in names)
    if near is None:
        return f"a pattern for some of {', '.join(kinds)}"
    return f"did you mean '{near if near in names else f'*{near}*'}'?"


OPTIMIZER_RULES: tuple[Rule, ...] = (
    rate_order,
    rate_reaches_its_floor,
    constant_rate_has_no_decay,
    weight_decay_arrives,
    ramp_is_legal,
    ramp_has_a_named_schedule,
    ramp_ends_in_the_run,
    groups_have_parameters,
)
