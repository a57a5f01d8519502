"""Three layers of config become one tree: site < config < --set. Every node keeps the file and line it came from.

site.yaml ─┐
run.yaml  ─┼─ merge ─ ${paths.x} ─▶ one Mapping
--set a=b ─┘
"""

import re
from collections.abc import Iterable

from .problems import Problem, Severity, did_you_mean
from .secret_names import blanked, blanked_override
from .yaml_loader import Mapping, Node, Scalar, Sequence, parse_value

SITE_FILE = "site file"
SET = "--set"
_PATH = re.compile(r"\$\{paths\.([^}]*)\}")


def merge(below: Mapping, above: Mapping) -> Mapping:
    """Keys of `above` win; sections merge key by key; lists and single values are replaced whole."""
    entries = dict(below.entries)
    for key, node in above.entries.items():
        old = entries.get(key)
        entries[key] = merge(old, node) if isinstance(old, Mapping) and isinstance(node, Mapping) else node
    return Mapping(entries=entries, file=above.file, line=above.line)


def apply_overrides(root: Mapping, overrides: Iterable[str]) -> tuple[Mapping, tuple[Problem, ...]]:
    """Each `a.b=value` replaces or adds one value; the value is YAML (`[1, 2]`, `null`, `1e-4`)."""
    problems: list[Problem] = []
    for text in overrides:
        origin = f"{SET} {blanked_override(text)}"
        key, equals, value = text.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            problems.append(_error(origin, blanked(key), "this is no assignment", "section.key=value"))
            continue
        node, found = parse_value(value, file=origin)
        problems.extend(found)
        if node is None:
            continue
        replaced = _assign(root, parts, node)
        if isinstance(replaced, Mapping):
            root = replaced
        else:
            problems.append(_error(origin, key, "this names a place below a single value", "a key that exists"))
    return root, tuple(problems)


def _assign(node: Node, parts: list[str], value: Node) -> Node | None:
    """`node` with the value at `parts` replaced, None where a part leads into a single value or past a list's end."""
    head, rest = parts[0], parts[1:]
    if isinstance(node, Mapping):
        old = node.entries.get(head) or Mapping(file=value.file, line=value.line)
        if rest and isinstance(old, Scalar) and old.is_null:
            old = Mapping(file=value.file, line=value.line)
        new = _assign(old, rest, value) if rest else value
        if new is None:
            return None
        return Mapping(entries={**node.entries, head: new}, file=node.file, line=node.line)
    if isinstance(node, Sequence) and head.isdecimal() and int(head) < len(node.items):
        items = list(node.items)
        new = _assign(items[int(head)], rest, value) if rest else value
        if new is None:
            return None
        items[int(head)] = new
        return Sequence(items=tuple(items), file=node.file, line=node.line)
    return None


def substitute_paths(root: Mapping) -> tuple[Mapping, tuple[Problem, ...]]:
    """Replace `${paths.x}` in every text by the entry of `paths`, and take that section out of the tree."""
    paths = root.entries.get("paths")
    known: dict[str, str] = {}
    problems: list[Problem] = []
    if isinstance(paths, Mapping):
        known = {key: node.text for key, node in paths.entries.items() if isinstance(node, Scalar) and not node.is_null}
    elif paths is not None:
        problems.append(_error(paths.file, "paths", "this is a section", "lines of 'name: /path'", paths.line))
    rest = {key: node for key, node in root.entries.items() if key != "paths"}
    entries = {key: _substitute(node, key, known, problems) for key, node in rest.items()}
    return Mapping(entries=entries, file=root.file, line=root.line), tuple(problems)


def _substitute(node: Node, path: str, known: dict[str, str], problems: list[Problem]) -> Node:
    if isinstance(node, Mapping):
        entries = {key: _substitute(child, f"{path}.{key}", known, problems) for key, child in node.entries.items()}
        return Mapping(entries=entries, file=node.file, line=node.line)
    if isinstance(node, Sequence):
        items = tuple(_substitute(item, f"{path}.{i}", known, problems) for i, item in enumerate(node.items))
        return Sequence(items=items, file=node.file, line=node.line)
    names = _PATH.findall(node.text)
    for name in names:
        if name not in known:
            expected = did_you_mean(name, known) if known else "an entry of 'paths' in the site file"
            message = f"${{paths.{name}}} is not defined"
            problems.append(_error(node.file, path, message, expected, node.line))
    if not names:
        return node
    text = _PATH.sub(lambda match: known.get(match.group(1), match.group(0)), node.text)
    return Scalar(text=text, quoted=node.quoted, file=node.file, line=node.line)


def _error(file: str, key: str, message: str, expected: str, line: int = 0) -> Problem:
    return Problem(
        severity=Severity.ERROR, file=file, line=line, key=key, found=None, expected=expected, message=message
    )
