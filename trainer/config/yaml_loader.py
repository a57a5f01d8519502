"""The one YAML loader: text in, a tree that forgets nothing out.

YAML 1.1 guesses types from spelling: `12:30:00` becomes 45000, `no` false, `010` eight, while `1e-4` stays text. Here
the tree keeps each scalar's own text, whether it was quoted, and its line; the field that receives it decides what it
means (`typed.py`). Refused: duplicate keys, tags, merge keys, keys that are no text, a second document, alias bombs.

    bytes ──decode──▶ text ──events (PyYAML's SafeLoader)──▶ Mapping | Sequence | Scalar

This file exists twice, byte for byte (trainer and orchestrator share no code; a contract test compares them).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .problems import Problem, Severity, shorten
from .secret_names import REDACTED, blanked, is_secret_key

MAX_BYTES = 4 << 20
MAX_NODES = 100_000
MAX_DEPTH = 64
NULL_WORDS = frozenset({"", "~", "null", "Null", "NULL"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """One value as written: its text, and whether it stood in quotes (then it is text whatever it looks like)."""

    text: str
    quoted: bool
    file: str
    line: int

    @property
    def is_null(self) -> bool:
        """An empty value, `~` or `null`, not in quotes."""
        return not self.quoted and self.text in NULL_WORDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """A list of nodes."""

    items: tuple["Node", ...]
    file: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapping:
    """Keys and nodes in the order written; `line` of an entry's node is the line of its key."""

    entries: dict[str, "Node"] = field(default_factory=dict)
    file: str
    line: int


Node = Scalar | Sequence | Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """What a file says: its root mapping (empty when it has none) and everything wrong with its text."""

    root: Mapping
    problems: tuple[Problem, ...]


class _Refused(Exception):
    """Ends the reading of a text: `line` and `message` become its last problem."""

    def __init__(self, *, line: int, message: str, expected: str, key: str = "") -> None:
        super().__init__(message)
        self.line, self.message, self.expected, self.key = line, message, expected, key


def load_file(path: Path) -> Document:
    """Read and parse `path`; every failure, also of the file system, is a problem with file and line."""
    name = str(path)
    try:
        size = path.stat().st_size
        data = path.read_bytes() if path.is_file() and size <= MAX_BYTES else None
    except OSError as error:
        return _unreadable(name, 0, f"cannot be read: {error.strerror or error}", "a YAML file")
    if data is None:
        what = "is too large for a config" if path.is_file() else "is no regular file"
        return _unreadable(name, 0, what, f"a YAML file of at most {MAX_BYTES >> 20} MiB")
    return parse_bytes(data, file=name)


def parse_bytes(data: bytes, *, file: str) -> Document:
    """Decode UTF-8 (a byte order mark is allowed) and parse; binary data is one problem, with its line."""
    binary = re.search(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", data)
    if binary:
        line = data.count(b"\n", 0, binary.start()) + 1
        return _unreadable(file, line, "this is binary data, not a YAML config", _SHAPE)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        return _unreadable(file, line, "this line is not UTF-8 text", "a YAML file in UTF-8")
    return parse_text(text, file=file)


def parse_text(text: str, *, file: str) -> Document:
    """Parse a config: one document whose root is a mapping of sections."""
    if text.startswith("#!"):
        return _unreadable(
            file, 1, f"this is a script ({shorten(text.splitlines()[0], 40)}), not a YAML config", _SHAPE
        )
    root, problems = _build(text, file)
    if root is None or isinstance(root, Mapping):
        if root is None and not problems:
            return _unreadable(file, 1, "the file is empty", _SHAPE)
        return Document(root=root or Mapping(file=file, line=1), problems=problems)
    shape = "a list" if isinstance(root, Sequence) else f"the text {shorten(root.text, 40)!r}"
    late = _problem(file, root.line, "", f"this is {shape}, not a YAML config", _SHAPE)
    return Document(root=Mapping(file=file, line=1), problems=(*problems, late))


def parse_value(text: str, *, file: str, line: int = 0) -> tuple[Node | None, tuple[Problem, ...]]:
    """Parse one value (the right side of `--set a.b=…`); nothing after the equals sign is an empty scalar."""
    if not text.strip():
        return Scalar(text="", quoted=False, file=file, line=line), ()
    node, problems = _build(text, file)
    return (None if node is None else _at_line(node, line)), problems


_SHAPE = "a YAML mapping of sections such as 'general:', 'parallelism:', 'model:'"


def _unreadable(file: str, line: int, message: str, expected: str) -> Document:
    return Document(root=Mapping(file=file, line=1), problems=(_problem(file, line, "", message, expected),))


def _problem(file: str, line: int, key: str, message: str, expected: str) -> Problem:
    return Problem(
        severity=Severity.ERROR, file=file, line=line, key=key, found=None, expected=expected, message=message
    )


def _build(text: str, file: str) -> tuple[Node | None, tuple[Problem, ...]]:
    builder = _Builder(file)
    try:
        node = builder.document(iter(yaml.parse(text, Loader=yaml.SafeLoader)))
    except _Refused as refused:
        builder.add(refused.line, refused.key, refused.message, refused.expected)
        return None, tuple(builder.problems)
    except yaml.MarkedYAMLError as error:
        builder.add(*_syntax(error, text, file))
        return None, tuple(builder.problems)
    except yaml.YAMLError as error:
        builder.add(1, "", f"not YAML: {shorten(' '.join(str(error).split()), 120)}", _SHAPE)
        return None, tuple(builder.problems)
    return node, tuple(builder.problems)


def _syntax(error: yaml.MarkedYAMLError, text: str, file: str) -> tuple[int, str, str, str]:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else 1
    lines = text.splitlines()
    here = lines[line - 1] if line <= len(lines) else ""
    if "\t" in here[: len(here) - len(here.lstrip())] or "'\\t'" in (error.problem or ""):
        return line, "", "a tab stands where YAML needs spaces", "indentation by spaces"
    if blanked(here) != here or file.endswith(REDACTED):  # neither the line nor the parser's words may show a secret
        return line, "", "not YAML: the value of a secret cannot be read", "a value in quotes, on one line"
    what = error.problem or error.context or "it cannot be parsed"
    return line, "", f"not YAML: {what} in {shorten(here.strip(), 60)!r}", _SHAPE


class _Builder:
    """Turns PyYAML's events into nodes, collecting what it can go on after and raising on the rest."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.problems: list[Problem] = []
        self.anchors: dict[str, Node] = {}
        self.num_nodes = 0

    def add(self, line: int, key: str, message: str, expected: str) -> None:
        self.problems.append(_problem(self.file, line, key, message, expected))

    def document(self, events: Iterator[Any]) -> Node | None:
        """The first document's root, None when there is none."""
        root: Node | None = None
        seen = 0
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                seen += 1
                if seen > 1:
                    raise _Refused(line=_line(event), message="a second document starts here", expected="one document")
                first = next(events)
                empty = isinstance(first, yaml.ScalarEvent) and first.value == "" and first.style is None
                root = None if empty else self.node(first, events, (), None)
        return root

    def node(self, event: Any, events: Iterator[Any], path: tuple[str, ...], line: int | None) -> Node:
        at = _line(event) if line is None else line
        if isinstance(event, yaml.AliasEvent):
            return self.alias(event, path, at)
        self.count(1, at, path)
        self.check_tag(event, path, at)
        if isinstance(event, yaml.ScalarEvent):
            node: Node = Scalar(text=event.value, quoted=event.style is not None, file=self.file, line=at)
        elif isinstance(event, yaml.SequenceStartEvent):
            node = self.sequence(events, path, at)
        else:
            node = self.mapping(events, path, at)
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        return node

    def count(self, num: int, line: int, path: tuple[str, ...]) -> None:
        self.num_nodes += num
        if len(path) > MAX_DEPTH:
            raise _Refused(line=line, message="nested too deep", expected=f"at most {MAX_DEPTH} levels")
        if self.num_nodes > MAX_NODES:
            limit = f"at most {MAX_NODES} values"
            raise _Refused(line=line, message="too large when its aliases are written out", expected=limit)

    def check_tag(self, event: Any, path: tuple[str, ...], line: int) -> None:
        if event.tag is not None:
            tag = "" if self.hides(path) else " " + shorten(event.tag.replace("tag:yaml.org,2002:", "!!"), 60)
            self.add(line, ".".join(path), f"the tag{tag} is not allowed", "a plain value, no tag")

    def hides(self, path: tuple[str, ...]) -> bool:
        """Whether what stands at `path` is a secret: `!abc` and `*abc` may be meant as values."""
        return is_secret_key(".".join(path)) or self.file.endswith(REDACTED)  # --set …=***

    def alias(self, event: Any, path: tuple[str, ...], line: int) -> Node:
        node = self.anchors.get(event.anchor)
        if node is None:  # not seen yet, or an ancestor of itself
            what = f"*{'' if self.hides(path) else event.anchor} names nothing that is complete here"
            raise _Refused(line=line, key=".".join(path), message=what, expected="an anchor defined above")
        self.count(_size(node), line, path)
        return _at_line(node, line)

    def sequence(self, events: Iterator[Any], path: tuple[str, ...], line: int) -> Sequence:
        items: list[Node] = []
        for event in events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            items.append(self.node(event, events, (*path, str(len(items))), None))
        return Sequence(items=tuple(items), file=self.file, line=line)

    def mapping(self, events: Iterator[Any], path: tuple[str, ...], line: int) -> Mapping:
        entries: dict[str, Node] = {}
        for event in events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            key_line = _line(event)
            key = self.key(event, path, key_line)
            child = self.node(next(events), events, (*path, key), key_line)
            if key == "<<":
                self.add(key_line, ".".join(path), "the merge key << is not allowed", "the keys written out")
            elif key in entries:
                expected = f"each key once (first on line {entries[key].line})"
                self.add(key_line, ".".join((*path, key)), "this key is given twice", expected)
            else:
                entries[key] = child
        return Mapping(entries=entries, file=self.file, line=line)

    def key(self, event: Any, path: tuple[str, ...], line: int) -> str:
        if not isinstance(event, yaml.ScalarEvent):
            where = ".".join(path)
            raise _Refused(line=line, key=where, message="a list, mapping or alias stands as a key", expected="a word")
        self.check_tag(event, path, line)
        return str(event.value)


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


def _size(node: Node) -> int:
    """Number of values in `node`, itself included."""
    if isinstance(node, Sequence):
        return 1 + sum(_size(item) for item in node.items)
    if isinstance(node, Mapping):
        return 1 + sum(_size(item) for item in node.entries.values())
    return 1


def _at_line(node: Node, line: int) -> Node:
    """`node` as if it stood on `line` (where an alias is used, not where it was defined)."""
    if isinstance(node, Scalar):
        return Scalar(text=node.text, quoted=node.quoted, file=node.file, line=line)
    if isinstance(node, Sequence):
        return Sequence(items=tuple(_at_line(item, line) for item in node.items), file=node.file, line=line)
    return Mapping(entries={k: _at_line(v, line) for k, v in node.entries.items()}, file=node.file, line=line)
