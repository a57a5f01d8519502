"""Rules about what is read: sources and their weights, stages, the held-out set, the tokenizer."""

import math
from collections.abc import Iterator
from typing import Any

from .problems import Severity, quoted
from .rules import Finding, Given, Rule

# Rounding in a file of three-digit weights; a larger deviation from 1 is worth a word.
SUM_TOLERANCE = 1e-6


def one_source_of_data(c: Any, given: Given) -> Iterator[Finding]:
    if given("data") and given("data_stages"):
        yield Finding(key="data", message="data and data_stages are both given", expected="one of them")
    elif not given("data") and not given("data_stages"):
        yield Finding(key="data", message="this section is missing", expected="data, or data_stages")


def stages_cover_the_run(c: Any, given: Given) -> Iterator[Finding]:
    """Some stage starts at step 1, no two at the same step; one that starts after the end is never reached."""
    if c.data_stages is None:
        return
    starts = [stage.start_training_step for stage in c.data_stages]
    if 1 not in starts:
        found = ", ".join(map(str, starts)) or "no stage"
        message = "no stage starts at step 1"
        yield Finding(key="data_stages", message=message, found=found, expected="one with start_training_step: 1")
    for index, start in enumerate(starts):
        key = f"data_stages.{index}.start_training_step"
        if start in starts[:index]:
            message = "another stage starts at this step"
            yield Finding(key=key, message=message, found=str(start), expected="a step of its own")
        if start > c.tokens.train_steps:
            message = f"this stage is never reached: the last step is {c.tokens.train_steps}"
            yield Finding(key=key, message=message, found=str(start), severity=Severity.WARNING)


def weights(c: Any, given: Given) -> Iterator[Finding]:
    for key, data in sources(c):
        yield from _weights(f"{key}.dataset.dataset_weights", data.dataset)


def _weights(key: str, dataset: Any) -> Iterator[Finding]:
    """Weights are shares: not negative, not all zero, one for each folder. They are divided by their sum."""
    values, num_folders = dataset.dataset_weights, len(dataset.dataset_folder)
    if values is None:
        return
    found = ", ".join(f"{value:g}" for value in values) or "an empty list"
    if len(values) != num_folders:
        message = f"{len(values)} weights for {num_folders} folders"
        yield Finding(key=key, message=message, found=found, expected=f"{num_folders} weights")
    if any(value < 0 for value in values):
        yield Finding(key=key, message="a weight is negative", found=found, expected="shares of 0 or more")
    total = math.fsum(values)
    if not any(values):
        yield Finding(key=key, message="all weights are zero", found=found, expected="at least one above 0")
    elif abs(total - 1) > SUM_TOLERANCE and total > 0:
        message = f"the weights add up to {total:.6g}; each is divided by that"
        yield Finding(key=key, message=message, severity=Severity.WARNING)


def held_out_is_held_out(c: Any, given: Given) -> Iterator[Finding]:
    for key, data in sources(c):
        if data.validation is None:
            continue
        shared = sorted(set(data.validation.dataset_folder) & set(data.dataset.dataset_folder))
        if shared:
            message = "this folder is trained on: its loss says nothing about unseen text"
            where = f"{key}.validation.dataset_folder"
            yield Finding(key=where, message=message, found=quoted(shared[0]), severity=Severity.WARNING)


def validation_is_shorter_than_the_training(c: Any, given: Given) -> Iterator[Finding]:
    """Passes over more samples than the whole run trains on are a slip in a number, or in the folder's purpose."""
    trained, interval = c.train_samples, c.tokens.val_check_interval
    passes = 1 if interval is None else -(-c.tokens.train_steps // interval)
    for key, data in sources(c):
        if data.validation is not None and passes * data.validation.num_samples > trained:
            samples = data.validation.num_samples
            what = f"a validation pass of {samples:,} samples is"
            if samples <= trained:
                what = f"{passes:,} validation passes (tokens.val_check_interval {interval}) of {samples:,} samples are"
            message = (
                f"{what} longer than the training, {trained:,} samples in {c.tokens.train_steps:,} steps (fewer, where "
                "the folders hold fewer)"
            )
            where = f"{key}.validation.num_samples"
            yield Finding(key=where, message=message, found=str(samples), severity=Severity.WARNING)


def validation_has_something_to_measure(c: Any, given: Given) -> Iterator[Finding]:
    """The held-out sets are those of the first stage, for the whole run: losses over other sets do not compare."""
    datas = [c.data] if c.data is not None else []
    datas += [stage.data for stage in sorted(c.data_stages or (), key=lambda stage: stage.start_training_step)]
    if c.tokens.val_check_interval is not None and datas and datas[0].validation is None:
        message, key = "nothing is held out: there is no validation in the (first) data section", "val_check_interval"
        found = str(c.tokens.val_check_interval)
        yield Finding(key=f"tokens.{key}", message=message, found=found, severity=Severity.WARNING)
    for index, stage in enumerate(c.data_stages or ()):
        if stage.data.validation not in (None, datas[0].validation):
            message = "ignored: what the first stage holds out is measured for the whole run"
            where = f"data_stages.{index}.data.validation"
            yield Finding(key=where, message=message, severity=Severity.WARNING)


def tokenizer_for_the_export(c: Any, given: Given) -> Iterator[Finding]:
    if c.tokenizer is None:
        message = "no tokenizer: an export will hold the model alone, and whoever loads it must bring the tokenizer"
        yield Finding(key="tokenizer", message=message, severity=Severity.WARNING)


def sources(c: Any) -> Iterator[tuple[str, Any]]:
    """(key, data section) of every stage."""
    if c.data is not None:
        yield "data", c.data
    for index, stage in enumerate(c.data_stages or ()):
        yield f"data_stages.{index}.data", stage.data


DATA_RULES: tuple[Rule, ...] = (
    one_source_of_data,
    stages_cover_the_run,
    weights,
    held_out_is_held_out,
    validation_is_shorter_than_the_training,
    validation_has_something_to_measure,
    tokenizer_for_the_export,
)
