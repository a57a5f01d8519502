"""Reading nodes by the type of the field that receives them.

    `no` for a bool field is false, for a text field the text "no"; `010` is ten or "010"; `1e-4` is a float or text.

A model is a pydantic class (BaseModel, or pydantic dataclass where a field bears a name BaseModel keeps for itself).
All problems of a mapping are collected: what could not be read leaves a hole, and pydantic judges everything else.

This file exists twice, byte for byte (trainer and orchestrator share no code; a contract test compares them).
"""

import re
import types
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from .problems import Problem, Severity, did_you_mean, nearest, quoted
from .yaml_loader import Mapping, Node, Scalar, Sequence

_TRUE = frozenset({"true", "yes", "on"})
_FALSE = frozenset({"false", "no", "off"})
_INT = re.compile(r"[-+]?[0-9](_?[0-9])*")
_FLOAT = re.compile(r"[-+]?([0-9](_?[0-9])*\.?([0-9](_?[0-9])*)?|\.[0-9](_?[0-9])*)([eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"([-+]?)\.?(inf|nan)", re.IGNORECASE)


class _Hole:
    """Stands for a value that could not be read; its own problem is already listed."""


HOLE = _Hole()


class MissingValue(LookupError):
    """A rule asked for a value that could not be read; the rule has nothing to say."""


class Partial:
    """The readable values of a section that has problems, so that rules can still judge them."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self._values:
            raise MissingValue(name)
        return self._values[name]


@dataclass(frozen=True, slots=True)
class Reading:
    """Collects problems while a tree is read. `problems` is appended to."""

    problems: list[Problem] = field(default_factory=list)

    def add(self, node: Node, path: str, message: str, expected: str | None, found: str | None = None) -> _Hole:
        """Note an error about `node` and give the hole that takes its place."""
        self.problems.append(
            Problem(
                severity=Severity.ERROR,
                file=node.file,
                line=node.line,
                key=path,
                found=found,
                expected=expected,
                message=message,
            )
        )
        return HOLE


def read(node: Node, annotation: Any, path: str, into: Reading) -> Any:
    """The Python value `node` means for a field of type `annotation`, or HOLE with a problem noted."""
    if get_origin(annotation) is not None and hasattr(annotation, "__metadata__"):
        return read(node, get_args(annotation)[0], path, into)  # Annotated[X, …]: the constraint is pydantic's
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return _read_union(node, get_args(annotation), path, into)
    if origin is Literal:
        return _read_literal(node, get_args(annotation), path, into)
    if origin in (list, tuple):
        return _read_list(node, get_args(annotation)[0], path, into, origin)
    if origin is dict:
        return _read_dict(node, get_args(annotation)[1], path, into)
    if is_model(annotation):
        return read_model(node, annotation, path, into)
    return _read_scalar(node, annotation, path, into)


def is_model(annotation: Any) -> bool:
    """Whether `annotation` is a class of named fields."""
    return isinstance(annotation, type) and (
        issubclass(annotation, BaseModel) or hasattr(annotation, "__pydantic_fields__")
    )


def fields_of(model: Any) -> dict[str, FieldInfo]:
    """Field name → pydantic's description, for both kinds of model class."""
    fields = model.model_fields if issubclass(model, BaseModel) else model.__pydantic_fields__
    return dict(fields)


def read_model(node: Node, model: Any, path: str, into: Reading) -> Any:
    """An instance of `model`, or a Partial with what could be read; every problem is noted."""
    if not isinstance(node, Mapping):
        into.add(node, path, "this is a section", f"keys such as {_some_keys(model)}", kind_of(node))
        return Partial({})
    fields = fields_of(model)
    values: dict[str, Any] = {}
    misspelt: set[str] = set()
    noted = len(into.problems)
    for key, child in node.entries.items():
        where = f"{path}.{key}" if path else key
        if key in fields:
            values[key] = read(child, fields[key].annotation, where, into)
        else:
            into.add(child, where, "unknown key", did_you_mean(key, fields))
            misspelt.add(nearest(key, fields) or "")
    try:
        return model(**values)
    except ValidationError as error:
        bad = _note_invalid(error, node, values, path, misspelt, into)
        into.problems[noted:] = [_or_null(problem, fields, path) for problem in into.problems[noted:]]
    defaults = {name: info.get_default() for name, info in fields.items() if _has_plain_default(info)}
    good = {key: value for key, value in values.items() if key not in bad or _is_readable_part(value)}
    rest = {key: value for key, value in defaults.items() if key not in values}
    return Partial(rest | good)


def _or_null(problem: Problem, fields: dict[str, FieldInfo], path: str) -> Problem:
    """A wrong value of a field that may be null: people write 0 or off to say that they want none of it."""
    info = fields.get(problem.key.removeprefix(f"{path}.") if path else problem.key)
    if info is None or problem.expected is None or type(None) not in get_args(info.annotation):
        return problem
    return replace(problem, expected=f"{problem.expected}, or null")


def _is_readable_part(value: Any) -> bool:
    """A section (or list of sections) of which at least something could be read."""
    if isinstance(value, list):
        return any(isinstance(item, Partial) for item in value)
    return isinstance(value, Partial)


def _has_plain_default(info: FieldInfo) -> bool:
    """A default that does not depend on other values."""
    return not info.is_required() and info.default_factory is None


def _note_invalid(
    error: ValidationError, node: Mapping, values: dict[str, Any], path: str, misspelt: set[str], into: Reading
) -> set[str]:
    """Turn pydantic's findings into problems, except those about holes; the names of the fields at fault.

    A missing key that stands there misspelt is one mistake, and was said where it stands.
    """
    bad: set[str] = set()
    found_by_pydantic = error.errors(include_url=False)
    for item in found_by_pydantic:
        if any(_is_nearer(other["loc"], item["loc"]) for other in found_by_pydantic):
            continue
        loc = [str(part) for part in item["loc"] if not _is_of_union(part)]
        head = loc[0] if loc else ""
        bad.add(head)
        where = ".".join(part for part in (path, *loc) if part)
        if item["type"] == "default_factory_not_called":
            continue  # a default that follows another key, and that key's own mistake is said already
        if item["type"] == "missing":
            if head not in misspelt:
                into.add(node, where, "this key is missing", None)
        elif not _holds_hole(values.get(head)):
            at = node.entries.get(head, node)
            for part in loc[1:]:
                at = child_of(at, part) or at
            found = quoted(at.text) if isinstance(at, Scalar) else None
            message, expected = _words(item["msg"])
            into.add(at, where, message, expected, found)
    return bad


def _is_of_union(part: int | str) -> bool:
    """Whether a part of a location is pydantic's name for a member of a union, such as list[int]; no key holds a [."""
    return isinstance(part, str) and "[" in part


def _is_nearer(one: tuple[int | str, ...], other: tuple[int | str, ...]) -> bool:
    """Whether `one` lies inside the value of which `other` says only that another member of its union does not fit."""
    at = next((index for index, part in enumerate(other) if _is_of_union(part)), None)
    return at is not None and one[:at] == other[:at] and one[at:] != other[at:] and len(one) > len(other)


def _words(message: str) -> tuple[str, str | None]:
    """pydantic's message as (message, expected): 'Input should be X' says what is expected."""
    if message.startswith("Input should be "):
        return "not a possible value", message.removeprefix("Input should be ")
    return message.removeprefix("Value error, "), None


def _holds_hole(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_holds_hole(item) for item in value)
    if isinstance(value, dict):
        return any(_holds_hole(item) for item in value.values())
    return isinstance(value, (_Hole, Partial))


def _some_keys(model: Any) -> str:
    return ", ".join(list(fields_of(model))[:4])


def child_of(node: Node, part: str) -> Node | None:
    """The node under key or list index `part`, None when there is none."""
    if isinstance(node, Mapping):
        return node.entries.get(part)
    if isinstance(node, Sequence) and part.isdecimal() and int(part) < len(node.items):
        return node.items[int(part)]
    return None


def lookup(node: Node, path: str) -> Node:
    """The node at the dotted `path`, or its nearest ancestor that exists."""
    for part in path.split("."):
        child = child_of(node, part)
        if child is None:
            break
        node = child
    return node


def kind_of(node: Node) -> str:
    """What a node is, in a person's words."""
    if isinstance(node, Mapping):
        return "a section"
    if isinstance(node, Sequence):
        return "a list"
    if node.is_null:
        return "nothing"
    return f"'{node.text}' (in quotes, so text)" if node.quoted else quoted(node.text)


def _read_union(node: Node, options: tuple[Any, ...], path: str, into: Reading) -> Any:
    rest = [option for option in options if option is not type(None)]
    if len(rest) < len(options) and isinstance(node, Scalar) and node.is_null:
        return None
    fitting = _fitting(node, rest)
    value = read(node, fitting, path, into)
    if value is HOLE and get_origin(fitting) is Literal and any(get_origin(option) is list for option in rest):
        last = into.problems[-1]
        into.problems[-1] = replace(last, expected=f"{last.expected}, or a list")
    return value


def _fitting(node: Node, options: list[Any]) -> Any:
    """The member of a union meant by the shape of the node; the first one when no shape fits."""
    for option in options:
        origin = get_origin(option)
        if isinstance(node, Sequence) and origin in (list, tuple):
            return option
        if isinstance(node, Mapping) and (origin is dict or is_model(option)):
            return option
        if isinstance(node, Scalar) and not is_model(option) and origin not in (list, tuple, dict):
            return option
    return options[0]


def _read_literal(node: Node, choices: tuple[Any, ...], path: str, into: Reading) -> Any:
    expected = "one of " + ", ".join(str(choice) for choice in choices)
    if isinstance(node, Scalar) and not node.is_null:
        for choice in choices:
            if node.text == str(choice) and (isinstance(choice, str) or not node.quoted):
                return choice
        lowered = {str(choice).lower(): choice for choice in choices}
        if node.text.lower() in lowered:
            expected = f"{lowered[node.text.lower()]} (upper and lower case matter)"
    return into.add(node, path, "not a possible value", expected, kind_of(node))


def _read_list(node: Node, item: Any, path: str, into: Reading, make: Any) -> Any:
    if not isinstance(node, Sequence):
        return into.add(node, path, "this is a list", "one value a line, each after '- '", kind_of(node))
    return make(read(child, item, f"{path}.{index}", into) for index, child in enumerate(node.items))


def _read_dict(node: Node, value: Any, path: str, into: Reading) -> Any:
    if not isinstance(node, Mapping):
        return into.add(node, path, "this is a table", "lines of 'name: value'", kind_of(node))
    return {key: read(child, value, f"{path}.{key}", into) for key, child in node.entries.items()}


def _read_scalar(node: Node, annotation: Any, path: str, into: Reading) -> Any:
    name = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[annotation]
    if not isinstance(node, Scalar):
        return into.add(node, path, "one value stands here", name, kind_of(node))
    if annotation is str:
        return node.text if not node.is_null else into.add(node, path, "not a possible value", name, kind_of(node))
    value = None if node.quoted else scalar_value(node.text, annotation)
    if value is not None:
        return value
    hint = name + (" without quotes" if node.quoted and scalar_value(node.text, annotation) is not None else "")
    return into.add(node, path, "not a possible value", hint, kind_of(node))


def scalar_value(text: str, annotation: type) -> bool | int | float | None:
    """What the plain `text` means as bool, int or float, None when it is none. Zeros may lead: 010 is ten."""
    if annotation is bool:
        word = text.lower()
        return True if word in _TRUE else False if word in _FALSE else None
    if annotation is int:
        return _int(text)
    special = _SPECIAL.fullmatch(text)
    if special:
        return float(special.group(1) + special.group(2))
    return float(text.replace("_", "")) if _FLOAT.fullmatch(text) else None


def _int(text: str) -> int | None:
    if _INT.fullmatch(text):
        return int(text.replace("_", "")) if len(text) <= 25 else None
    if _FLOAT.fullmatch(text):  # people write 1e5 steps; a fraction is refused
        value = float(text.replace("_", ""))
        return int(value) if value.is_integer() and abs(value) < 2**53 else None
    return None


def walk(node: Node, path: str = "") -> Iterator[tuple[str, Scalar]]:
    """Every scalar below `node` with its dotted path."""
    if isinstance(node, Scalar):
        yield path, node
    elif isinstance(node, Sequence):
        for index, item in enumerate(node.items):
            yield from walk(item, f"{path}.{index}" if path else str(index))
    else:
        for key, child in node.entries.items():
            yield from walk(child, f"{path}.{key}" if path else key)
