"""A config checked whole: the trainer's verdict (by its command, never an import) plus the orchestrator's own rules.

python -m trainer check CONFIG --json ──▶ problems, facts, foreign sections
                                             └─ typed here, rules of launch, world size = nodes × ranks per node
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigProblems, PawlError
from orchestrator.state.records import LaunchFacts, Unreadable, parse_launch_facts

from .launch_rules import SectionReading, resolve, too_few_gpus
from .problems import Problem, Severity, format_problem, has_errors, problem_from_dict
from .spec import RunSpec
from .tree import from_json, to_yaml
from .typed import walk
from .yaml_loader import Mapping, Node, Scalar, Sequence, parse_text

SCHEMA_VERSION = 1
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The whole verdict. `spec` and `facts` are None while an error stands in their way.

    config    the trainer's sections with all defaults          merged        every section as plain data
    origins   dotted key → "file:line", "--set …", "default"    merged_yaml   the same as text that reads back exactly
    """

    problems: tuple[Problem, ...]
    spec: RunSpec | None
    facts: LaunchFacts | None
    config: dict[str, Any] | None
    merged: dict[str, Any]
    merged_yaml: str
    origins: dict[str, str]
    gpus: tuple[dict[str, Any], ...] = ()
    fit: dict[str, Any] | None = None
    curve: tuple[dict[str, Any], ...] = ()

    @property
    def ok(self) -> bool:
        return not has_errors(self.problems)

    @property
    def unchecked(self) -> tuple[Problem, ...]:
        """What this machine could not see."""
        return tuple(problem for problem in self.problems if problem.severity is Severity.UNCHECKED)

    def require(self) -> tuple[RunSpec, LaunchFacts]:
        """Spec and facts of a config that must be right; raises ConfigProblems listing every error."""
        errors = [problem for problem in self.problems if problem.severity is Severity.ERROR]
        if errors or self.spec is None or self.facts is None:
            raise ConfigProblems("the config cannot be used:\n" + "\n".join(map(format_problem, errors)))
        return self.spec, self.facts


def run_check(
    config: Path,
    *,
    overrides: Iterable[str] = (),
    site: Path | None = None,
    here: bool = False,
    cwd: Path | None = None,
) -> CheckResult:
    """Check `config` over the site file and under the overrides. Relative paths in it mean `cwd`, else this folder.

    Raises PawlError when the trainer's command cannot be run or does not answer; problems of the config are returned.
    """
    answer = ask_trainer(config, overrides=tuple(overrides), site=site, here=here, cwd=cwd)
    problems = [problem_from_dict(item) for item in answer["problems"]]
    foreign = {name: from_json(data) for name, data in answer["foreign"].items()}
    sections = SectionReading(foreign)
    spec, shape_problems = resolve(sections, answer["mesh"])
    problems += [*sections.reading.problems, *shape_problems]
    if spec is not None:
        problems += too_few_gpus(sections, spec, answer["gpus"])
    facts = None if answer["facts"] is None else parse_launch_facts(json.dumps(answer["facts"]))
    if isinstance(facts, Unreadable):
        raise PawlError(f"The trainer's launch facts cannot be read: {facts.why}. Are both packages of one version?")
    return CheckResult(
        problems=in_order(problems),
        spec=spec,
        facts=facts,
        config=answer["config"],
        merged=answer["merged"],
        merged_yaml=answer["merged_yaml"],
        origins=answer["origins"],
        gpus=tuple(answer["gpus"]),
        fit=answer["fit"],
        curve=tuple(answer["curve"] or ()),
    )


def ask_trainer(
    config: Path, *, overrides: tuple[str, ...], site: Path | None, here: bool, cwd: Path | None = None
) -> dict[str, Any]:
    """Run `python -m trainer check --json` and parse its document. Raises PawlError when there is none."""
    command = [sys.executable, "-m", "trainer", "check", "--json", *(f"--set={text}" for text in overrides)]
    command += [f"--site={site}"] if site is not None else []
    command += ["--here"] if here else []
    command += ["--", str(config)]
    # No plugin of pydantic is wanted, and looking for one costs a tenth of the answer's time.
    env = {**os.environ, "PYTHONSAFEPATH": "1", "PYDANTIC_DISABLE_PLUGINS": "__all__"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=env, cwd=cwd, check=False)
    except subprocess.TimeoutExpired as error:
        raise PawlError(
            f"`trainer check` gave no answer within {TIMEOUT_S:.0f} s; is a folder of {config} hanging?"
        ) from error
    except OSError as error:
        raise PawlError(f"`trainer check` cannot be started: {error.strerror or error} ({sys.executable}).") from error
    try:
        answer = json.loads(done.stdout)
    except ValueError as error:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise PawlError(f"`trainer check` failed with exit code {done.returncode}: {last[:300]}") from error
    if not isinstance(answer, dict) or answer.get("schema_version") != SCHEMA_VERSION:
        raise PawlError("`trainer check` answers in another version; install orchestrator and trainer together.")
    return answer


def in_order(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """By file in order of appearance, then by line; equal findings once."""
    unique = list(dict.fromkeys(problems))
    files = list(dict.fromkeys(problem.file for problem in unique))
    return tuple(sorted(unique, key=lambda problem: (files.index(problem.file), problem.line)))


def with_values(merged_yaml: str, values: dict[str, str]) -> str:
    """The YAML with the texts at the given dotted keys replaced (secrets blanked, a name changed).

    Raises KeyError for a key that holds no single value.
    """
    root = parse_text(merged_yaml, file="run.yaml").root
    missing = set(values) - {path for path, _ in walk(root)}
    if missing:
        raise KeyError(", ".join(sorted(missing)))
    replaced = _replace(root, "", values)
    assert isinstance(replaced, Mapping)
    return to_yaml(replaced)


def _replace(node: Node, path: str, values: dict[str, str]) -> Node:
    if isinstance(node, Scalar):
        if path not in values:
            return node
        return Scalar(text=values[path], quoted=True, file=node.file, line=node.line)
    if isinstance(node, Sequence):
        items = tuple(_replace(item, f"{path}.{i}", values) for i, item in enumerate(node.items))
        return Sequence(items=items, file=node.file, line=node.line)
    entries = {key: _replace(child, f"{path}.{key}".lstrip("."), values) for key, child in node.entries.items()}
    return Mapping(entries=entries, file=node.file, line=node.line)
