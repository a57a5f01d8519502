"""The frozen answers of a run: its current config, spec and launch facts, read back from the run directory.

run.yaml (revision 1) ─ revisions/0002.yaml ─ revisions/0003.yaml      the newest is current; derived, never stored
launch_facts.json                                                       the trainer's answer about the current one
"""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orchestrator.config.launch_rules import SectionReading, resolve
from orchestrator.config.problems import format_problem, has_errors
from orchestrator.config.spec import SECTIONS, RunSpec
from orchestrator.config.typed import child_of
from orchestrator.config.yaml_loader import Mapping, Scalar, load_file
from orchestrator.errors import ConfigProblems, PawlError
from orchestrator.state.copies import Copies
from orchestrator.state.fsio import list_names, read_text
from orchestrator.state.records import LaunchFacts, Unreadable, parse_launch_facts
from orchestrator.state.retention import Retention
from orchestrator.state.rundir import RunPaths

_REVISION = re.compile(r"(?P<number>\d{4,})\.yaml", re.ASCII)


def revision_path(paths: RunPaths, number: int) -> Path:
    """revisions/0002.yaml; number 1 is run.yaml itself."""
    return paths.config if number == 1 else paths.root / "revisions" / f"{number:04d}.yaml"


def current_revision(paths: RunPaths) -> int:
    """The number of the newest revision, 1 when nothing was changed. Raises PawlError when that cannot be known."""
    names = list_names(paths.root / "revisions")
    if names is None:
        raise PawlError(f"{paths.root / 'revisions'} cannot be listed, so the run's current config is unknown.")
    found = (_REVISION.fullmatch(name) for name in names)
    return max((int(match["number"]) for match in found if match), default=1)


def current_config(paths: RunPaths) -> Path:
    """The YAML that the next attempt runs with."""
    return revision_path(paths, current_revision(paths))


def read_facts(paths: RunPaths) -> LaunchFacts:
    """The launch facts. Raises PawlError saying why they cannot be used."""
    facts = parse_launch_facts(read_text(paths.launch_facts))
    if isinstance(facts, Unreadable):
        raise PawlError(f"{paths.launch_facts}: {facts.why}. The run cannot be launched without it.")
    return facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """What an attempt of a run is made from. `config` is relative to the run directory."""

    spec: RunSpec
    facts: LaunchFacts
    config: str
    retention: Retention
    copies: Copies


def read_frozen(paths: RunPaths) -> Frozen:
    """Spec and facts as they were checked at submit or at the last revision; no trainer process is started.

    Raises ConfigProblems or PawlError when the run directory does not hold them any more.
    """
    config, facts = current_config(paths), read_facts(paths)
    document = load_file(config)
    nodes = {name: node for name, node in document.root.entries.items() if name in SECTIONS}
    sections = SectionReading(nodes)
    spec, shape_problems = resolve(sections, asdict(facts))
    problems = [*document.problems, *sections.reading.problems, *shape_problems]
    if spec is None or has_errors(problems):
        raise ConfigProblems("the run's frozen config cannot be used:\n" + "\n".join(map(format_problem, problems)))
    return Frozen(
        spec=spec,
        facts=facts,
        config=paths.relative(config),
        retention=retention_of(document.root),
        copies=copies_of(document.root),
    )


def retention_of(root: Mapping) -> Retention:
    """checkpoints.keep_last and keep_every; where one is not given, the trainer's default."""
    given = _checkpoint_texts(root, "keep_last", "keep_every")
    return Retention(**{name: int(text) for name, text in given.items() if text.isdecimal()})


def copies_of(root: Mapping) -> Copies:
    """checkpoints.upload_to and export_interval."""
    given = _checkpoint_texts(root, "upload_to", "export_interval")
    interval = given.get("export_interval", "")
    return Copies(upload_to=given.get("upload_to"), export_interval=int(interval) if interval.isdecimal() else None)


def frozen_copies(paths: RunPaths) -> Copies:
    """`copies_of` the run's current config."""
    return copies_of(load_file(current_config(paths)).root)


def _checkpoint_texts(root: Mapping, *names: str) -> dict[str, str]:
    """The values of keys of the checkpoints section that are given and not null, as text."""
    section = root.entries.get("checkpoints")
    nodes = {name: child_of(section, name) for name in names if section is not None}
    return {name: node.text for name, node in nodes.items() if isinstance(node, Scalar) and not node.is_null}


def retention_of_config(config: dict[str, Any] | None) -> Retention:
    """Retention of a checked config with all its defaults."""
    checkpoints = (config or {}).get("checkpoints") or {}
    return Retention(keep_last=int(checkpoints.get("keep_last") or 2), keep_every=checkpoints.get("keep_every"))
