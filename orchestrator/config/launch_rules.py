"""Rules over the orchestrator's sections: what Slurm would misread or refuse, and whether the shape fits the mesh.

Pure: nodes and facts in, problems out. Every rule runs, also when another section is wrong.
"""

import re
import unicodedata
from collections.abc import Iterator
from typing import Any

from orchestrator.decide.taxonomy import FailureClass
from orchestrator.words import plural

from .problems import Problem, Severity, did_you_mean, quoted
from .spec import SECTIONS, RunSpec
from .typed import MissingValue, Partial, Reading, child_of, lookup, read_model, walk
from .yaml_loader import Mapping, Node, Scalar, Sequence

MAX_RANKS_PER_NODE = 8
_TIME = re.compile(r"\d+(-\d{1,2}(:\d{1,2}(:\d{1,2})?)?|:\d{1,2}(:\d{1,2})?)?|UNLIMITED|INFINITE", re.IGNORECASE)
_MEMORY = re.compile(r"\d+[KMGT]?", re.IGNORECASE)
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPTION = re.compile(r"--[a-z][a-z0-9-]*(=.*)?")
# Controls, invisible format characters, lone surrogates, line separators: no quoting makes them safe in one line.
_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


class SectionReading:
    """The typed sections (or what could be read of them) and the problems found on the way."""

    def __init__(self, foreign: dict[str, Node]) -> None:
        self.root = Mapping(entries={name: _as_lines(name, node) for name, node in foreign.items()}, file="", line=0)
        self.reading = Reading()
        self.sections: dict[str, Any] = {}
        for name, model in SECTIONS.items():
            node = self.root.entries.get(name)
            if node is None or (isinstance(node, Scalar) and node.is_null):
                self.sections[name] = model()
            else:
                self.sections[name] = read_model(node, model, name, self.reading)
        for rule in (_one_line_values, _slurm_forms, _environment, _extra_options, _budgets, _not_yet):
            self.reading.problems.extend(rule(self))

    def node(self, key: str) -> Node:
        """The node at a dotted key, or its nearest ancestor."""
        return lookup(self.root, key)

    def value(self, key: str) -> Scalar | None:
        """The scalar at a dotted key, None where there is none."""
        node: Node | None = self.root
        for part in key.split("."):
            node = None if node is None else child_of(node, part)
        return node if isinstance(node, Scalar) and not node.is_null else None

    def problem(
        self,
        key: str,
        message: str,
        *,
        found: str | None = None,
        expected: str | None = None,
        node: Node | None = None,
        severity: Severity = Severity.ERROR,
    ) -> Problem:
        at = node or self.node(key)
        return Problem(
            severity=severity, file=at.file, line=at.line, key=key, found=found, expected=expected, message=message
        )


def _as_lines(section: str, node: Node) -> Node:
    """Lists where Slurm wants one text: node names are joined by commas, prologue lines by newlines."""
    joins = {"nodelist": ",", "exclude": ",", "prologue": "\n"}
    if section != "slurm" or not isinstance(node, Mapping):
        return node
    entries = {
        key: _joined(child, joins[key]) if key in joins and isinstance(child, Sequence) else child
        for key, child in node.entries.items()
    }
    return Mapping(entries=entries, file=node.file, line=node.line)


def _joined(node: Sequence, glue: str) -> Node:
    texts = [item.text for item in node.items if isinstance(item, Scalar)]
    if len(texts) != len(node.items) or not texts:
        return node
    return Scalar(text=glue.join(texts), quoted=True, file=node.file, line=node.line)


def _one_line_values(of: SectionReading) -> Iterator[Problem]:
    """A newline or an invisible character in a value that becomes one line of a script or one argument."""
    for path, scalar in walk(of.root):
        allowed = "\n\t" if path == "slurm.prologue" else ""
        bad = next((c for c in scalar.text if c not in allowed and unicodedata.category(c) in _UNSAFE), None)
        if bad is not None:
            message = f"holds the character U+{ord(bad):04X}, which cannot be passed on in one line"
            yield of.problem(path, message, found=quoted(scalar.text), expected="one line of visible text", node=scalar)


def _slurm_forms(of: SectionReading) -> Iterator[Problem]:
    time = of.value("slurm.time")
    forms = "minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS"
    if time is not None and not _TIME.fullmatch(time.text):
        yield of.problem("slurm.time", "Slurm knows no such time", found=quoted(time.text), expected=forms)
    elif time is not None and re.fullmatch(r"\d+:\d{1,2}", time.text):
        minutes, seconds = time.text.split(":")
        message = f"Slurm reads this as {int(minutes)} minutes {int(seconds)} seconds"
        hours = f"{minutes}:{seconds}:00 if hours are meant"
        yield of.problem("slurm.time", message, found=quoted(time.text), expected=hours, severity=Severity.WARNING)
    mem = of.value("slurm.mem")
    if mem is not None and not _MEMORY.fullmatch(mem.text):
        expected = "a whole number, with K, M, G or T behind it (alone: megabytes)"
        yield of.problem("slurm.mem", "Slurm knows no such size", found=quoted(mem.text), expected=expected)


def _environment(of: SectionReading) -> Iterator[Problem]:
    """Names are kept letter for letter, so they must be names."""
    env = child_of(of.root.entries.get("slurm", of.root), "env")
    for name, node in env.entries.items() if isinstance(env, Mapping) else ():
        if not _IDENTIFIER.fullmatch(name):
            expected = "letters, digits and _, no digit first"
            yield of.problem(f"slurm.env.{name}", "no name of an environment variable", expected=expected, node=node)


def _extra_options(of: SectionReading) -> Iterator[Problem]:
    extra = child_of(of.root.entries.get("slurm", of.root), "extra")
    for index, node in enumerate(extra.items if isinstance(extra, Sequence) else ()):
        if isinstance(node, Scalar) and not _OPTION.fullmatch(node.text):
            expected = "--flag or --flag=value"
            yield of.problem(
                f"slurm.extra.{index}", "no sbatch option", found=quoted(node.text), expected=expected, node=node
            )


def _budgets(of: SectionReading) -> Iterator[Problem]:
    budgets = child_of(of.root.entries.get("recovery", of.root), "budgets")
    classes = [str(failure) for failure in FailureClass]
    for name, node in budgets.entries.items() if isinstance(budgets, Mapping) else ():
        if name not in classes:
            expected = did_you_mean(name, classes)
            yield of.problem(f"recovery.budgets.{name}", "unknown failure class", expected=expected, node=node)


def _not_yet(of: SectionReading) -> Iterator[Problem]:
    """Keys that are read and kept, but have no effect in this version."""
    mode = of.value("monitoring.mode")
    if mode is not None and mode.text in ("gateway", "textfile"):
        message = "this version serves metrics from the nodes only"
        yield of.problem("monitoring.mode", message, found=quoted(mode.text), expected="nodes")
    successors = of.value("recovery.successors")
    if successors is not None and successors.text != "0":
        message = "this version queues no successor jobs"
        yield of.problem("recovery.successors", message, found=quoted(successors.text), severity=Severity.WARNING)
    if child_of(of.root.entries.get("notify", of.root), "command") is not None:
        message = "this version sends no notifications; the command is not run"
        yield of.problem("notify.command", message, severity=Severity.WARNING)


def resolve(of: SectionReading, mesh: dict[str, int] | None) -> tuple[RunSpec | None, list[Problem]]:
    """The whole spec with its shape, or the problems in the way of it.

    `mesh`: sizes of the axes and world_size, None when they could not be read; the shape is unknown then.
    """
    slurm = of.sections["slurm"]
    try:
        asked = slurm.nodes, slurm.ranks_per_node
    except MissingValue:
        return None, []
    if mesh is None:
        return None, []
    nodes, ranks = shape(*asked, mesh["world_size"])
    if nodes * ranks != mesh["world_size"]:
        return None, [_wrong_shape(of, nodes, ranks, mesh)]
    if any(isinstance(section, Partial) for section in of.sections.values()):
        return None, []
    return RunSpec(**of.sections, num_nodes=nodes, ranks_per_node=ranks), []


def shape(nodes: int | None, ranks_per_node: int | None, world_size: int) -> tuple[int, int]:
    """(nodes, ranks per node); what is not given follows from the other, eight ranks on a node where neither is."""
    if ranks_per_node is None:
        even = nodes is not None and world_size % nodes == 0
        ranks_per_node = world_size // nodes if nodes and even else min(MAX_RANKS_PER_NODE, world_size)
    if nodes is None:
        nodes = max(1, world_size // ranks_per_node)
    return nodes, ranks_per_node


def _wrong_shape(of: SectionReading, nodes: int, ranks: int, mesh: dict[str, int]) -> Problem:
    key = "slurm.nodes" if of.value("slurm.nodes") is not None else "slurm.ranks_per_node"
    axes = " × ".join(f"{axis} {mesh[axis]}" for axis in ("dp", "pp", "tp", "cp") if mesh[axis] > 1 or axis != "cp")
    world = mesh["world_size"]
    return of.problem(
        key,
        f"nodes {nodes} × ranks_per_node {ranks} = {plural(nodes * ranks, 'rank')}, but parallelism asks for {axes} = "
        f"{world}",
        found=f"{nodes} × {ranks} = {nodes * ranks}",
        expected=_fitting_shapes(nodes, ranks, world),
    )


def _fitting_shapes(nodes: int, ranks: int, world: int) -> str:
    """The nearest change of one number that makes them equal."""
    ways = []
    if world % ranks == 0:
        ways.append(f"slurm.nodes: {world // ranks}")
    if world % nodes == 0:
        ways.append(f"slurm.ranks_per_node: {world // nodes}")
    return " or ".join(ways) or f"{plural(world, 'rank')} in all"


def too_few_gpus(of: SectionReading, spec: RunSpec, gpus: list[dict[str, Any]]) -> Iterator[Problem]:
    """On this machine with the local launcher, every rank of a node wants a GPU of its own."""
    asked = spec.launcher.kind == "local" and spec.slurm.gpu_request != "none"
    if asked and gpus and spec.ranks_per_node > len(gpus):
        message = f"{plural(spec.ranks_per_node, 'rank')} on a node, but this machine shows {plural(len(gpus), 'GPU')}"
        yield of.problem("slurm.ranks_per_node", message, expected=f"at most {len(gpus)}, or slurm.gpu_request: none")
