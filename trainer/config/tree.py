"""A node tree as plain data, as JSON with its marks, and as YAML text that reads back to the same tree.

    to_json/from_json   crosses the process border with text, quotes and lines kept, so the receiving field decides
    to_plain            what a person would expect to see in JSON; ambiguous spellings stay text
    to_yaml             the frozen `run.yaml`: `12:30:00`, `007` and `"1"` come back exactly as they were given
    without_secrets     a config's text as it may be kept and shown

This file exists twice, byte for byte (trainer and orchestrator share no code; a contract test compares them).
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from .secret_names import REDACTED, is_secret_key
from .typed import scalar_value
from .yaml_loader import Mapping, Node, Scalar, Sequence, parse_text

# Spelled so, YAML and every reader agree on what it is: no leading zero, no underscore, no base 60.
_PLAIN_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_SAFE_PLAIN = re.compile(r"[A-Za-z0-9_./+-][A-Za-z0-9_./+@%=^~-]*(:[A-Za-z0-9_./+@%=^~-]+)*")


def to_json(node: Node) -> dict[str, Any]:
    """`{"text", "quoted"}`, `{"list"}` or `{"map"}`, each with file and line."""
    mark: dict[str, Any] = {"file": node.file, "line": node.line}
    if isinstance(node, Scalar):
        return {"text": node.text, "quoted": node.quoted, **mark}
    if isinstance(node, Sequence):
        return {"list": [to_json(item) for item in node.items], **mark}
    return {"map": {key: to_json(child) for key, child in node.entries.items()}, **mark}


def from_json(data: dict[str, Any]) -> Node:
    """The inverse of `to_json`; raises KeyError on another shape."""
    file, line = str(data["file"]), int(data["line"])
    if "text" in data:
        return Scalar(text=str(data["text"]), quoted=bool(data["quoted"]), file=file, line=line)
    if "list" in data:
        return Sequence(items=tuple(from_json(item) for item in data["list"]), file=file, line=line)
    return Mapping(entries={key: from_json(child) for key, child in data["map"].items()}, file=file, line=line)


def to_plain(node: Node) -> Any:
    """Python data; a number only where its spelling allows no second reading, else the text."""
    if isinstance(node, Sequence):
        return [to_plain(item) for item in node.items]
    if isinstance(node, Mapping):
        return {key: to_plain(child) for key, child in node.entries.items()}
    if node.is_null:
        return None
    if node.quoted:
        return node.text
    if node.text in ("true", "false"):
        return node.text == "true"
    if _PLAIN_NUMBER.fullmatch(node.text):
        return scalar_value(node.text, int if re.fullmatch(r"-?[0-9]+", node.text) else float)
    return node.text


def to_yaml(root: Mapping) -> str:
    """Block-style YAML of `root`; `parse_text` gives the same texts and quotes again (marks aside)."""
    return "".join(line + "\n" for line in _lines(root, 0)) or "{}\n"


def without_secrets(text: str) -> str:
    """A config's text with *** for every secret in it, wherever it stands; text without any comes back unchanged.

    An `env` that is no table is blanked whole: what it holds cannot be told apart.
    """
    root = parse_text(text, file="").root
    clean = hide_secrets(root)
    return text if clean == root or not isinstance(clean, Mapping) else to_yaml(clean)


def hide_secrets(node: Node, key: str = "") -> Node:
    """The tree below a dotted key with *** in place of every secret."""
    if isinstance(node, Scalar) and node.is_null:
        return node
    if is_secret_key(key) or (key == "slurm.env" and not isinstance(node, Mapping)):
        return Scalar(text=REDACTED, quoted=True, file=node.file, line=node.line)
    if isinstance(node, Mapping):
        entries = {name: hide_secrets(child, f"{key}.{name}" if key else name) for name, child in node.entries.items()}
        return replace(node, entries=entries)
    if isinstance(node, Sequence):
        return replace(node, items=tuple(hide_secrets(item, key) for item in node.items))
    return node


def _lines(node: Node, depth: int) -> Iterator[str]:
    pad = "  " * depth
    if isinstance(node, Mapping):
        for key, child in node.entries.items():
            yield from _entry(f"{pad}{_scalar(key, quoted=False)}:", child, depth)
    elif isinstance(node, Sequence):
        for item in node.items:
            yield from _entry(f"{pad}-", item, depth)


def _entry(head: str, node: Node, depth: int) -> Iterator[str]:
    if isinstance(node, Scalar):
        text = "null" if node.is_null else _scalar(node.text, quoted=node.quoted)
        yield f"{head} {text}"
    elif isinstance(node, Mapping) and not node.entries:
        yield f"{head} {{}}"
    elif isinstance(node, Sequence) and not node.items:
        yield f"{head} []"
    else:
        yield head
        yield from _lines(node, depth + 1)


def _scalar(text: str, *, quoted: bool) -> str:
    """The text bare where YAML reads it back bare, else in double quotes."""
    bare = not quoted and _SAFE_PLAIN.fullmatch(text) and text not in ("-", "---", "...")
    return text if bare else '"' + "".join(map(_escaped, text)) + '"'


def _escaped(char: str) -> str:
    """One character inside double quotes. JSON's escapes would not do: it writes one character as two surrogates."""
    if char in '"\\':
        return "\\" + char
    if char.isprintable():
        return char
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
