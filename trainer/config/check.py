"""`python -m trainer check CONFIG`: every problem at once, the launch facts, and where each value comes from.

    --json prints
        {schema_version, ok, problems, config, merged, merged_yaml, origins, foreign, mesh, facts, curve, fit, gpus}
        config       the trainer's sections with all defaults, null while something in them is wrong
        merged       the whole layered config as plain data; merged_yaml the same as text that reads back exactly
        foreign      the orchestrator's sections as scalar text with quotes and marks, for it to validate
        curve        learning rate, weight decay and batch size at the steps where one of them changes its course
        mesh         dp, pp, tp, cp and world_size, known also when something else is wrong
        origins      dotted key → "file:line", "--set …" or "default"

Exit code 0, or 2 when there is an error. Imports no torch.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trainer.activations import ACCELERATOR, CPU
from trainer.memory import PURPOSES

from .facts import as_data, curve, launch_facts
from .here import (
    Fit,
    LocalGpu,
    compiler_findings,
    data_findings,
    fit,
    fit_findings,
    local_gpus,
    own_schedule,
    schedule_findings,
    start_findings,
    tokenizer_findings,
)
from .load import Loaded, load
from .problems import Problem, Severity, format_problem, has_errors
from .rules import locate
from .tree import hide_secrets, to_plain, to_yaml
from .typed import child_of, walk
from .yaml_loader import Mapping, Scalar

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A loaded config together with what this machine says about it."""

    loaded: Loaded
    problems: tuple[Problem, ...]
    facts: dict[str, Any] | None
    fit: Fit | None
    gpus: tuple[LocalGpu, ...]

    @property
    def ok(self) -> bool:
        return not has_errors(self.problems)


def check(path: Path, *, site: Path | None = None, overrides: Iterable[str] = (), here: bool = False) -> Checked:
    """Load `path` and look at this machine; `here` demands what else would only be noted as unchecked."""
    loaded = load(path, site=site, overrides=overrides)
    config = loaded.config
    if config is None:
        return Checked(loaded=loaded, problems=loaded.problems, facts=None, fit=None, gpus=())
    gpu_type = gpu_type_of(loaded.merged)
    wants_gpu = setting(loaded.merged, "slurm", "gpu_request") != "none"
    gpus = local_gpus() if wants_gpu else ()
    schedule = own_schedule(config)
    result = fit(config, gpu_type=gpu_type, gpus=gpus, schedule=schedule) if wants_gpu else None
    findings = [*data_findings(config, required=here), *tokenizer_findings(config, required=here)]
    findings += [*start_findings(config, required=here), *schedule_findings(config, required=here)]
    if not gpus:
        findings += compiler_findings(config, required=here and not wants_gpu)
    if wants_gpu:
        findings += fit_findings(config, result, gpu_type)
    seen = (locate(finding, loaded.merged) for finding in findings)
    facts = launch_facts(config, schedule=schedule, kernels=ACCELERATOR if wants_gpu else CPU)
    return Checked(loaded=loaded, problems=(*loaded.problems, *seen), facts=facts, fit=result, gpus=gpus)


def setting(tree: Mapping, section: str, key: str) -> str | None:
    """The text of one value of a section that is not ours, None where it is not given."""
    node = tree.entries.get(section)
    value = child_of(node, key) if node is not None else None
    return value.text if isinstance(value, Scalar) and not value.is_null else None


def gpu_type_of(tree: Mapping) -> str | None:
    """slurm.gpu_type, the only fact of the orchestrator's sections that the memory check needs."""
    return setting(tree, "slurm", "gpu_type")


def origins(loaded: Loaded) -> dict[str, str]:
    """Where each value comes from; for the trainer's sections also those that nobody gave."""
    given = {path: origin(node) for path, node in walk(loaded.merged)}
    if loaded.config is None:
        return given
    defaults = {path: "default" for path in _leaves(as_data(loaded.config)) if not _is_given(path, given)}
    return given | defaults


def origin(node: Scalar) -> str:
    """`file:line`, or the `--set` that gave the value."""
    return f"{node.file}:{node.line}" if node.line else node.file


def _is_given(path: str, given: dict[str, str]) -> bool:
    return path in given or any(key.startswith(path + ".") for key in given)


def _leaves(data: Any, path: str = "") -> Iterator[str]:
    if isinstance(data, dict) and data:
        for key, value in data.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(data, list) and data:
        for index, value in enumerate(data):
            yield from _leaves(value, f"{path}.{index}")
    else:
        yield path


def as_json(checked: Checked) -> dict[str, Any]:
    """The document of `--json`."""
    loaded = checked.loaded
    return {
        "schema_version": SCHEMA_VERSION,
        "ok": checked.ok,
        "problems": [problem.as_dict() for problem in checked.problems],
        "config": None if loaded.config is None else as_data(loaded.config),
        "merged": to_plain(loaded.merged),
        "merged_yaml": to_yaml(loaded.merged),
        "origins": origins(loaded),
        "foreign": loaded.foreign,
        "mesh": loaded.mesh,
        "facts": checked.facts,
        "curve": None if loaded.config is None else curve(loaded.config),
        "fit": None if checked.fit is None else asdict(checked.fit),
        "gpus": [asdict(gpu) for gpu in checked.gpus],
    }


def as_text(checked: Checked, *, show: bool) -> Iterator[str]:
    """The report for a person: problems, what was not checked, values with their origin, facts."""
    for problem in checked.problems:
        if problem.severity is not Severity.UNCHECKED:
            yield format_problem(problem)
    unchecked = [problem for problem in checked.problems if problem.severity is Severity.UNCHECKED]
    if unchecked:
        yield "not checked on this machine (--here demands it):"
        yield from (f"  {problem.key}: {problem.message} {problem.found or ''}".rstrip() for problem in unchecked)
    if show:
        hidden = hide_secrets(checked.loaded.merged)
        assert isinstance(hidden, Mapping)
        values = dict(walk(hidden))
        for path, where in sorted(origins(replace(checked.loaded, merged=hidden)).items()):
            value = values[path].text if path in values else default_of(checked, path)
            yield f"{path} = {value}    [{where}]"
        if checked.loaded.config is not None:
            yield from _curve_text(curve(checked.loaded.config))
    if checked.facts is not None:
        yield from _facts_text(checked.facts, checked.fit)
    yield "ok" if checked.ok else "not usable as it stands"


def default_of(checked: Checked, path: str) -> str:
    """The value at `path` of the config with all defaults, for a person."""
    value: Any = None if checked.loaded.config is None else as_data(checked.loaded.config)
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value if isinstance(value, str) else json.dumps(value)


def _facts_text(facts: dict[str, Any], result: Fit | None) -> Iterator[str]:
    memory = facts["memory_per_rank_bytes"]
    mesh = " × ".join(f"{axis} {facts[axis]}" for axis in ("dp", "pp", "tp", "cp"))
    yield f"ranks       {facts['world_size']} = {mesh}"
    yield f"parameters  {facts['num_params']:,}; a checkpoint is {facts['checkpoint_bytes'] / 1e9:.3g} GB"
    yield f"step        {facts['samples_per_step']:,} samples, {facts['tokens_per_step']:,} tokens"
    yield f"run         {facts['train_steps']:,} steps, {facts['train_samples'] * facts['sequence_length']:,} tokens"
    parts = ", ".join(f"{name} {memory[name] / 1e9:.3g}" for name in PURPOSES)
    stages = ", ".join(map(str, memory["stages"]))
    where = f", pipeline rank {memory['pp_rank']} with stage {stages}" if facts["pp"] > 1 else ""
    yield f"memory      about {memory['total'] / 1e9:.3g} GB on the fullest rank{where} ({parts})"
    if result is not None and result.fits:
        yield f"fits        one {result.gpu}; micro_batch_size could be up to {result.largest_micro_batch}"


def _curve_text(points: Iterable[dict[str, Any]]) -> Iterator[str]:
    for at in points:
        rates = f"learning rate {at['lr']:.4g}, weight decay {at['weight_decay']:.4g}"
        yield f"at step     {at['step']:,}: {rates}, {at['batch_size']:,} samples"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG", help="the run's YAML file")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--site", type=Path, default=None, metavar="FILE", help="site file to lay under the config")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="replace one value; repeatable")
    parser.add_argument("--here", action="store_true", help="demand that folders, tokenizer and GPU are seen here")
    parser.add_argument("--show", action="store_true", help="print every value and where it comes from")


def main(args: argparse.Namespace) -> int:
    """Print the verdict; 0, or 2 when there is an error."""
    checked = check(args.config, site=args.site, overrides=args.set, here=args.here)
    if args.json:
        json.dump(as_json(checked), sys.stdout)
        sys.stdout.write("\n")
    else:
        for line in as_text(checked, show=args.show):
            print(line)
    return 0 if checked.ok else 2
