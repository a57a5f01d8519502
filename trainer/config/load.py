"""Files in, one judged config out: read, layer, translate nanotron's spellings, type, apply rules. Nothing is raised.

Loaded.config    the typed trainer sections, None while anything in them is wrong
Loaded.merged    the whole tree with every section, as written (frozen as run.yaml)
Loaded.foreign   the orchestrator's sections, untyped: it validates them by its own classes
Loaded.mesh      sizes of the axes and their product, known also when something else is wrong
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError

from .layers import apply_overrides, merge, substitute_paths
from .model import Config
from .nanotron import translate
from .problems import Problem, Severity, did_you_mean, format_problem, has_errors
from .rules import RULES, judge
from .rules_data import DATA_RULES
from .rules_model import MODEL_RULES
from .rules_optimizer import OPTIMIZER_RULES
from .rules_pipeline import PIPELINE_RULES
from .tree import to_json
from .typed import MissingValue, Partial, Reading, fields_of, read_model
from .yaml_loader import Mapping, load_file

ORCHESTRATOR_SECTIONS = ("slurm", "recovery", "monitoring", "launcher", "notify")
SITE_KEYS = ("runs_root", "paths", *ORCHESTRATOR_SECTIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What loading a config gives. `config` is None if any problem is an error about the trainer's sections."""

    config: Config | None
    merged: Mapping
    foreign: dict[str, dict[str, Any]]
    problems: tuple[Problem, ...]
    mesh: dict[str, int] | None

    @property
    def ok(self) -> bool:
        return not has_errors(self.problems)


def load(path: Path | str, *, site: Path | str | None = None, overrides: Iterable[str] = ()) -> Loaded:
    """Read `path` over the site file and under the overrides; all problems at once, in the order of the file."""
    document = load_file(Path(path))
    problems = list(document.problems)
    below = Mapping(file=str(path), line=1)
    if site is not None:
        below, found = _site_layer(Path(site))
        problems += found
    unreadable = has_errors(problems) and not document.root.entries
    tree, found_set = apply_overrides(merge(below, document.root), overrides)
    merged, found_paths = substitute_paths(tree)
    problems += [*found_set, *found_paths]
    if unreadable:  # an empty tree would only add 'missing' to what was said about the text
        return Loaded(config=None, merged=merged, foreign={}, problems=_in_order(problems), mesh=None)
    config, found_own = own_sections(merged)
    problems += found_own
    foreign = {name: to_json(node) for name, node in merged.entries.items() if name in ORCHESTRATOR_SECTIONS}
    usable = config if isinstance(config, Config) and not has_errors(problems) else None
    return Loaded(config=usable, merged=merged, foreign=foreign, problems=_in_order(problems), mesh=_mesh_sizes(config))


def load_config(path: Path | str) -> Config:
    """The typed config of a file that must be right; raises ConfigError that lists every problem."""
    loaded = load(path)
    if loaded.config is None:
        errors = [format_problem(problem) for problem in loaded.problems if problem.severity is Severity.ERROR]
        raise ConfigError("\n".join(errors))
    return loaded.config


def _site_layer(path: Path) -> tuple[Mapping, list[Problem]]:
    """The part of the site file that lies under a config: defaults of the orchestrator's sections, and paths."""
    document = load_file(path)
    problems = list(document.problems)
    entries = {}
    for key, node in document.root.entries.items():
        if key not in SITE_KEYS:
            unknown = Problem(
                severity=Severity.ERROR, file=node.file, line=node.line, key=key, found=None,
                expected=did_you_mean(key, SITE_KEYS), message="unknown key in the site file",
            )  # fmt: skip
            problems.append(unknown)
        elif key != "runs_root":
            entries[key] = node
    return Mapping(entries=entries, file=str(path), line=1), problems


def own_sections(merged: Mapping) -> tuple[Config | Partial | None, list[Problem]]:
    """Type and judge the trainer's sections of a tree. The config is a Partial where something could not be read."""
    own = {key: node for key, node in merged.entries.items() if key not in ORCHESTRATOR_SECTIONS}
    tree, problems = translate(replace(merged, entries=own))
    reading = Reading()
    unknown = [key for key in tree.entries if key not in fields_of(Config)]
    for key in unknown:
        known = (*fields_of(Config), *ORCHESTRATOR_SECTIONS, "paths")
        reading.add(tree.entries[key], key, "unknown section", did_you_mean(key, known))
    tree = replace(tree, entries={key: node for key, node in tree.entries.items() if key not in unknown})
    config = read_model(tree, Config, "", reading)
    problems += reading.problems
    problems += judge(config, tree, (*RULES, *MODEL_RULES, *DATA_RULES, *OPTIMIZER_RULES, *PIPELINE_RULES))
    return config, problems


def _mesh_sizes(config: Any) -> dict[str, int] | None:
    """The axes of a Config or Partial and their product; None where one of them could not be read."""
    try:
        sizes = {axis: int(getattr(config.parallelism, axis)) for axis in ("dp", "pp", "tp", "cp")}
    except MissingValue:
        return None
    return {**sizes, "world_size": math.prod(sizes.values())}


def _in_order(problems: list[Problem]) -> tuple[Problem, ...]:
    """By file in order of appearance, then by line; equal findings once."""
    files = list(dict.fromkeys(problem.file for problem in problems))
    unique = dict.fromkeys(problems)
    return tuple(sorted(unique, key=lambda problem: (files.index(problem.file), problem.line)))
