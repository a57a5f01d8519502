"""Judgements over several values of a config. A rule is a pure function: values in, findings out; all rules are asked.

    Partial sections (something in them could not be read) are judged as far as their values go: a rule that needs a
    missing value raises MissingValue and has nothing to say.

Rules of the architecture stand in `rules_model.py`, of data in `rules_data.py`, of the pipeline in `rules_pipeline.py`,
of rates and batch sizes in `rules_optimizer.py`. Nothing here looks at this machine; that is `here.py`.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .problems import Problem, Severity, quoted
from .typed import MissingValue, child_of, lookup
from .yaml_loader import Mapping, Node

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A rule's verdict about one key; the line is found afterwards."""

    key: str
    message: str
    found: str | None = None
    expected: str | None = None
    severity: Severity = Severity.ERROR


Given = Callable[[str], bool]
Rule = Callable[[Any, Given], Iterator[Finding]]


def judge(config: Any, tree: Mapping, rules: tuple[Rule, ...]) -> list[Problem]:
    """Findings of all `rules` about `config` (a Config or a Partial), each at the line of its key in `tree`."""
    problems: list[Problem] = []
    for rule in rules:
        try:
            findings = list(rule(config, lambda path: is_given(tree, path)))
        except MissingValue:
            continue
        problems += [locate(finding, tree) for finding in findings]
    return problems


def is_given(tree: Node, path: str) -> bool:
    """Whether the config says anything at `path`."""
    node: Node | None = tree
    for part in path.split("."):
        node = None if node is None else child_of(node, part)
    return node is not None


def locate(finding: Finding, tree: Mapping) -> Problem:
    """The finding with file and line of its key, or of the nearest section that exists."""
    node = lookup(tree, finding.key)
    line = 0 if node is tree else node.line
    return Problem(
        severity=finding.severity,
        file=node.file,
        line=line,
        key=finding.key,
        found=finding.found,
        expected=finding.expected,
        message=finding.message,
    )


def run_name(c: Any, given: Given) -> Iterator[Finding]:
    """The run's name is a directory, a job name and a metric label."""
    if not RUN_NAME.fullmatch(c.general.run):
        expected = "letters, digits, '.', '_' and '-', a letter or digit first, at most 100"
        yield Finding(
            key="general.run", message="not usable as a run's name", found=quoted(c.general.run), expected=expected
        )


def project_name(c: Any, given: Given) -> Iterator[Finding]:
    if not c.general.project.isprintable():
        found = quoted(c.general.project)
        yield Finding(
            key="general.project", message="holds control characters", found=found, expected="one line of text"
        )


def starts_at_zero(c: Any, given: Given) -> Iterator[Finding]:
    if c.general.step:
        why = "ignored: where a run goes on from is decided by its checkpoints"
        yield Finding(key="general.step", message=why, found=str(c.general.step), severity=Severity.WARNING)


def heads_over_tp(c: Any, given: Given) -> Iterator[Finding]:
    """Each tp rank owns whole heads and whole kv heads."""
    tp, heads, kv = c.parallelism.tp, c.model.model_config.num_attention_heads, c.model.model_config.num_key_value_heads
    if heads % tp or kv % tp:
        fits = divisors(math.gcd(heads, kv, c.model.model_config.intermediate_size))
        yield Finding(
            key="parallelism.tp",
            message=f"{heads} heads and {kv} kv heads cannot be shared out over tp = {tp}",
            found=str(tp),
            expected=f"tp one of {', '.join(map(str, fits))}",
        )


def ffn_over_tp(c: Any, given: Given) -> Iterator[Finding]:
    tp, model = c.parallelism.tp, c.model.model_config
    ffn, heads, kv = model.intermediate_size, model.num_attention_heads, model.num_key_value_heads
    if ffn % tp and not (heads % tp or kv % tp):  # else tp is already refused, with the sizes that suit all three
        key = "model.model_config.intermediate_size"
        yield Finding(key=key, message=f"not divisible by tp = {tp}", found=str(ffn), expected=f"a multiple of {tp}")


def length_within_positions(c: Any, given: Given) -> Iterator[Finding]:
    length, limit = c.tokens.sequence_length, c.model.model_config.max_position_embeddings
    if length > limit:
        expected = f"at most max_position_embeddings = {limit}"
        message = "longer than the model says it can read"
        yield Finding(key="tokens.sequence_length", message=message, found=str(length), expected=expected)


def axes_not_offered(c: Any, given: Given) -> Iterator[Finding]:
    mesh = c.parallelism
    for key, what in (("cp", "context parallelism"), ("expert_parallel_size", "expert parallelism")):
        degree = getattr(mesh, key)
        if degree > 1:
            yield Finding(key=f"parallelism.{key}", message=f"{what} is not offered", found=str(degree), expected="1")


def zero_stages(c: Any, given: Given) -> Iterator[Finding]:
    stage = c.optimizer.zero_stage
    if stage > 1:
        message = f"ZeRO-{stage} is not offered: under a pipeline it costs a reduce-scatter per micro-batch"
        message = message if stage in (2, 3) else "there is no such stage"
        yield Finding(key="optimizer.zero_stage", message=message, found=str(stage), expected="0 or 1")


def sequence_over_tp(c: Any, given: Given) -> Iterator[Finding]:
    """With sequence parallelism each tp rank owns equally many tokens of every sequence."""
    tp, length = c.parallelism.tp, c.tokens.sequence_length
    if c.parallelism.tp_mode == "REDUCE_SCATTER" and length % tp:
        below, above = length // tp * tp, -(-length // tp) * tp
        near = " or ".join(str(n) for n in (below, above) if n)
        yield Finding(
            key="tokens.sequence_length",
            message=f"sequence parallelism (parallelism.tp_mode REDUCE_SCATTER) cuts each sequence over tp = {tp}",
            found=str(length),
            expected=f"a multiple of {tp}: {near}; or tp_mode ALL_REDUCE",
        )


def something_is_recomputed(c: Any, given: Given) -> Iterator[Finding]:
    if c.model.recompute == "none" and c.model.recompute_interval > 1:
        message = "no effect: nothing is recomputed (model.recompute is none)"
        found, expected = str(c.model.recompute_interval), "recompute: full or selective, or no such key"
        key = "model.recompute_interval"
        yield Finding(key=key, message=message, found=found, expected=expected, severity=Severity.WARNING)


def wide_gradients(c: Any, given: Given) -> Iterator[Finding]:
    if not c.optimizer.accumulate_grad_in_fp32 and c.model.dtype == "bfloat16":
        message = "gradients are always accumulated in fp32"
        key = "optimizer.accumulate_grad_in_fp32"
        yield Finding(key=key, message=message, found="false", severity=Severity.WARNING)


def fused_update(c: Any, given: Given) -> Iterator[Finding]:
    if not c.optimizer.optimizer_factory.torch_adam_is_fused:
        message = "the update is always the fused one; the numbers are AdamW's either way"
        key = "optimizer.optimizer_factory.torch_adam_is_fused"
        yield Finding(key=key, message=message, found="false", severity=Severity.WARNING)


def saves_on_the_way(c: Any, given: Given) -> Iterator[Finding]:
    interval, steps = c.checkpoints.checkpoint_interval, c.tokens.train_steps
    if interval >= steps > 1:
        message = f"no checkpoint before the last of {steps} steps: a fault at any time costs the whole run"
        key = "checkpoints.checkpoint_interval"
        yield Finding(key=key, message=message, found=str(interval), severity=Severity.WARNING)


def kept_steps_are_saved(c: Any, given: Given) -> Iterator[Finding]:
    """keep_every keeps, and export_interval exports, what checkpoint_interval writes."""
    interval = c.checkpoints.checkpoint_interval
    for key in ("keep_every", "export_interval"):
        every = getattr(c.checkpoints, key)
        if every is not None and every % interval:
            meet = math.lcm(every, interval)
            message = f"no multiple of checkpoint_interval {interval}: only every {meet:,} steps a checkpoint meets it"
            path, expected = f"checkpoints.{key}", f"a multiple of {interval}"
            yield Finding(key=path, message=message, found=str(every), expected=expected, severity=Severity.WARNING)


def copies_have_a_place(c: Any, given: Given) -> Iterator[Finding]:
    """upload_to is a URL: a bare path would mean another folder on each machine that reads it."""
    url = c.checkpoints.upload_to
    rest = "" if url is None else url.partition("://")[2]
    if url is not None and ("@" in rest.partition("/")[0] or "?" in rest or "#" in rest):
        message, expected = (
            "a URL here holds no user, password or query",
            "credentials in the environment or a profile",
        )
        yield Finding(key="checkpoints.upload_to", message=message, expected=expected)
    elif url is not None and (not rest or not url.isprintable()):
        expected = "a URL such as s3://bucket/folder or file:///scratch/copies"
        yield Finding(key="checkpoints.upload_to", message="this is no URL", found=url, expected=expected)


def profile_within_the_run(c: Any, given: Given) -> Iterator[Finding]:
    """The window lies in the run, and its ranks exist."""
    if c.profiler is None:
        return
    first, steps = c.profiler.first_step, c.tokens.train_steps
    if first + c.profiler.num_steps - 1 > steps:
        what = "nothing is recorded" if first > steps else f"steps {first:,} to {steps:,} are recorded"
        message, found = f"{what}: the run has {steps:,} steps", f"{c.profiler.num_steps} from step {first:,} on"
        key = "profiler.first_step"
        yield Finding(key=key, message=message, found=found, severity=Severity.WARNING)
    if c.profiler.ranks == []:
        yield Finding(key="profiler.ranks", message="no rank would record", found="[]", expected="[0], or all")
    unknown = [] if c.profiler.ranks == "all" else [rank for rank in c.profiler.ranks if rank >= world_size(c)]
    if unknown:
        message, expected = f"the run has {world_size(c)} ranks", f"0 to {world_size(c) - 1}, or all"
        found = ", ".join(map(str, unknown))
        yield Finding(key="profiler.ranks", message=message, found=found, expected=expected)


def world_size(c: Any) -> int:
    """Ranks of the mesh."""
    mesh = c.parallelism
    return int(mesh.dp * mesh.pp * mesh.tp * mesh.cp)


def checkpoints_have_their_place(c: Any, given: Given) -> Iterator[Finding]:
    if c.checkpoints.checkpoints_path is not None:
        message = "ignored: checkpoints have a fixed place in the run directory"
        found = quoted(c.checkpoints.checkpoints_path)
        yield Finding(key="checkpoints.checkpoints_path", message=message, found=found, severity=Severity.WARNING)


def divisors(n: int) -> list[int]:
    """All divisors of n, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


RULES: tuple[Rule, ...] = (
    run_name,
    project_name,
    starts_at_zero,
    heads_over_tp,
    ffn_over_tp,
    length_within_positions,
    axes_not_offered,
    zero_stages,
    sequence_over_tp,
    something_is_recomputed,
    wide_gradients,
    fused_update,
    saves_on_the_way,
    kept_steps_are_saved,
    copies_have_a_place,
    checkpoints_have_their_place,
    profile_within_the_run,
)
