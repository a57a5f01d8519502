"""What `pawl check` prints: problems, what was not checked here, memory, launch facts, origins."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import typer

from orchestrator.cli.places import runs_folder
from orchestrator.config.check import CheckResult, run_check
from orchestrator.config.problems import Problem, Severity, format_problem
from orchestrator.config.secret_names import REDACTED, is_secret_key
from orchestrator.config.site import find_site
from orchestrator.config.spec import RunSpec
from orchestrator.errors import UsageError
from orchestrator.state.records import LaunchFacts
from orchestrator.submit.facts import retention_of_config
from orchestrator.submit.redact import redact
from orchestrator.submit.space import Need, free_bytes, nearest_existing, need_of, shortage, space_line
from orchestrator.views.human import size as human_size
from orchestrator.words import plural


def check_config(
    config: Path,
    *,
    overrides: tuple[str, ...],
    here: bool,
    show: bool,
    site: Path | None,
    as_json: bool,
    runs_root: Path | None = None,
) -> int:
    """Check and print; 0, or 2 when there is an error. `here`: also whether the checkpoints fit into `runs_root`."""
    result = redact(run_check(config, overrides=overrides, site=find_site(site), here=here))
    space = None
    if here and result.facts is not None:
        root, need = runs_folder(runs_root, site=site), need_of(result.facts, retention_of_config(result.config))
        space, result = space_data(root, need), with_shortage(result, root, need, file=str(config))
    if as_json:
        typer.echo(json.dumps({**as_data(result), "space": space}, indent=2, ensure_ascii=False))
    else:
        for line in report(result, show=show, space=None if space is None else str(space["text"])):
            typer.echo(line)
    return 0 if result.ok else UsageError.exit_code


def space_data(root: Path, need: Need) -> dict[str, object]:
    """Room for checkpoints as plain data; `quota_bytes` is None: pawl does not know it."""
    free = free_bytes(root)
    return {
        "folder": str(nearest_existing(root)),
        "needed_bytes": need.total,
        "free_bytes": free,
        "quota_bytes": None,
        "text": space_line(root, need),
    }


def with_shortage(result: CheckResult, root: Path, need: Need, *, file: str) -> CheckResult:
    """The verdict with one error more when the checkpoints do not fit."""
    why = shortage("" if result.facts is None else result.facts.run, root, need)
    if why is None:
        return result
    found, line = result.origins.get("checkpoints.keep_last", ""), 0
    if found.rpartition(":")[2].isdecimal():
        file, _, number = found.rpartition(":")
        line = int(number)
    problem = Problem(
        severity=Severity.ERROR,
        file=file,
        line=line,
        key="checkpoints.keep_last",
        found=None,
        expected=None,
        message=why,
    )
    return replace(result, problems=(*result.problems, problem))


def as_data(result: CheckResult) -> dict[str, Any]:
    """The document of --json."""
    spec = result.spec
    return {
        "schema_version": 1,
        "ok": result.ok,
        "problems": [problem.as_dict() for problem in result.problems],
        "facts": None if result.facts is None else asdict(result.facts),
        "curve": list(result.curve),
        "launch": None if spec is None else launch_data(spec),
        "fit": result.fit,
        "merged": result.merged,
        "origins": result.origins,
    }


def launch_data(spec: RunSpec) -> dict[str, Any]:
    """How many nodes and ranks the job has, and what of the config runs as the user's own code."""
    return {
        "nodes": spec.num_nodes,
        "spares": spec.recovery.spares,
        "ranks_per_node": spec.ranks_per_node,
        "launcher": spec.launcher.kind,
        "executed": list(spec.executed),
    }


def report(result: CheckResult, *, show: bool, space: str | None = None) -> Iterator[str]:
    """The verdict for a person."""
    for problem in result.problems:
        if problem.severity is not Severity.UNCHECKED:
            yield format_problem(problem)
    if result.unchecked:
        yield "Not checked on this machine (--here and submit require it):"
        yield from (
            f"  {problem.key}: {problem.message} {problem.found or ''}".rstrip() for problem in result.unchecked
        )
    if show:
        yield from values(result)
        if result.curve:
            yield from curve_table(result.curve)
    if result.facts is not None:
        yield from facts_table(result.facts)
        yield from fit_lines(result.fit)
    if space is not None:
        yield space
    if result.spec is not None and result.ok:
        # With errors the shape may be nothing but defaults, shown as if they were meant.
        yield from launch_lines(result.spec)
    errors = sum(problem.severity is Severity.ERROR for problem in result.problems)
    yield "ok" if result.ok else f"{plural(errors, 'error')}: not usable as it stands"


def facts_table(facts: LaunchFacts) -> Iterator[str]:
    """Sizes of the run, and where the memory of the fullest rank goes."""
    mesh = " × ".join(f"{axis} {getattr(facts, axis)}" for axis in ("dp", "pp", "tp", "cp"))
    same_size = facts.train_steps * facts.samples_per_step
    tokens = (same_size if facts.train_samples is None else facts.train_samples) * facts.sequence_length
    yield f"run         {facts.run}: {plural(facts.train_steps, 'step')}, {tokens:,} tokens"
    yield f"ranks       {facts.world_size} = {mesh}"
    samples, length = facts.samples_per_step, facts.sequence_length
    yield f"step        {plural(samples, 'sample')} × {length:,} = {facts.tokens_per_step:,} tokens"
    checkpoint = human_size(facts.checkpoint_bytes)
    yield f"parameters  {facts.num_params:,} ({facts.compute_dtype}); a checkpoint is {checkpoint}"
    yield from memory_table(facts)


def memory_table(facts: LaunchFacts) -> Iterator[str]:
    """Which rank is the fullest, and what of."""
    memory = facts.memory_per_rank_bytes
    where = ""
    if facts.pp > 1 and memory.pp_rank is not None and memory.stages is not None:
        stages = " and ".join(map(str, memory.stages))
        where = f" (pipeline rank {memory.pp_rank} of {facts.pp}, with stage {stages})"
    yield f"memory of the fullest rank{where}, estimated:"
    names = ("parameters", "gradients", "optimizer", "activations", "logits", "scratch", "total")
    sizes = {name: size for name in names if (size := getattr(memory, name)) is not None}
    width = max(map(len, sizes))
    yield from (f"  {name:<{width}}  {human_size(size):>9}" for name, size in sizes.items())


def curve_table(curve: Iterable[dict[str, Any]]) -> Iterator[str]:
    """What changes over the run, at the steps where it changes its course."""
    yield f"{'step':>12}  {'learning rate':>13}  {'weight decay':>12}  {'samples':>8}"
    for at in curve:
        rate, decay = f"{at['lr']:.4g}", f"{at['weight_decay']:.4g}"
        yield f"{at['step']:>12,}  {rate:>13}  {decay:>12}  {at['batch_size']:>8,}"


def fit_lines(fit: dict[str, Any] | None) -> Iterator[str]:
    """Whether it fits the GPU that is known; the problems say what would, where it does not."""
    if fit is not None and fit.get("fits"):
        yield f"fits        {fit['gpu']}; micro_batch_size could be up to {fit['largest_micro_batch']}"


def launch_lines(spec: RunSpec) -> Iterator[str]:
    """Nodes, spares, and the parts of the config that are executed."""
    spares = f" + {plural(spec.recovery.spares, 'hot spare')}" if spec.recovery.spares else ""
    shape = f"{plural(spec.num_nodes, 'node')} × {plural(spec.ranks_per_node, 'rank')}"
    where = "on this machine" if spec.launcher.kind == "local" else "by Slurm"
    yield f"launch      {shape}{spares}, started {where}"
    yield from (f"executes    {item}" for item in spec.executed)


def values(result: CheckResult) -> Iterator[str]:
    """Every value with its origin, defaults included."""
    sections = dict(result.config or {})
    if result.spec is not None:
        for name in ("slurm", "recovery", "monitoring", "launcher", "notify"):
            sections[name] = getattr(result.spec, name).model_dump(mode="json")
    leaves = dict(_leaves(result.merged)) | dict(_leaves(sections))
    for key in sorted(leaves):
        value = REDACTED if leaves[key] is not None and is_secret_key(key) else leaves[key]
        yield f"{key} = {json.dumps(value, ensure_ascii=False)}    [{_origin(key, result.origins)}]"


def _origin(key: str, origins: dict[str, str]) -> str:
    """The origin of a key, or of the list it stands for."""
    below = next((where for name, where in origins.items() if name.startswith(f"{key}.")), "default")
    return origins.get(key, below)


def _leaves(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(data, dict) and data:
        for key, value in data.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, data
