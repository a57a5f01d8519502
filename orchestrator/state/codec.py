"""Dataclass ↔ flat JSON, with every doubt reported.

A record is a frozen dataclass whose annotations are the schema: `decode` checks each field against them, ignores
unknown fields (a newer writer may add some), and names the field, what it expected and what it found. Numbers are not
coerced: `true` is no integer and `"3"` is no number. Integers have 64 bits, numbers are finite, and a field whose name
ends in `unix` is a time of the calendar: what nobody writes nobody has to survive. Supported: bool int float str,
`X | None`, tuples, `dict[str, X]`, StrEnums, nested dataclasses (one with a `from_json` classmethod decodes itself) and
`Any`.
"""

import dataclasses
import json
import math
import types
from collections.abc import Hashable
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

R = TypeVar("R")

_MISSING: Any = dataclasses.MISSING

MAX_INT = 2**63 - 1
# The last second that a calendar of four-digit years can name: nothing happens later, and no page can print it.
LAST_UNIX = 253_402_300_799.0


@cache
def _hints(cls: Hashable) -> dict[str, Any]:
    return get_type_hints(cls)


def decode(cls: type[R], data: object, *, where: str = "record") -> R:
    """The record `cls` of JSON object `data`. Raises ValueError naming the first field that does not fit."""
    by_hand = getattr(cls, "from_json", None)
    if by_hand is not None:
        return by_hand(data)  # type: ignore[no-any-return]
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected an object, found {show(data)}")
    hints = _hints(cls)  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name in data:
            value = _convert(hints[field.name], data[field.name], f"{where}.{field.name}")
            if field.name.endswith("unix") and value is not None and not 0 <= value <= LAST_UNIX:
                raise ValueError(f"{where}.{field.name}: {value} is no time")
            values[field.name] = value
        elif field.default is _MISSING and field.default_factory is _MISSING:
            raise ValueError(f"{where}.{field.name}: missing")
    return cls(**values)


def encode(record: object) -> Any:
    """The JSON value of a record: dataclasses become objects, tuples lists, enums their text."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {field.name: encode(getattr(record, field.name)) for field in dataclasses.fields(record)}
    if isinstance(record, dict):
        return {str(key): encode(value) for key, value in record.items()}
    if isinstance(record, tuple | list):
        return [encode(value) for value in record]
    return str(record) if isinstance(record, StrEnum) else record


def dumps(record: object, *, indent: int | None = None) -> str:
    """One JSON text; NaN and infinities are refused (ValueError), because JSON has none."""
    return json.dumps(encode(record), allow_nan=False, ensure_ascii=False, indent=indent)


def _convert(hint: Any, value: object, where: str) -> Any:
    if hint is Any:
        return value
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        (inner,) = [arg for arg in args if arg is not type(None)]
        return _convert(inner, value, where)
    if origin is tuple:
        return _convert_tuple(args, value, where)
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{where}: expected an object, found {show(value)}")
        return {str(key): _convert(args[1], item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return _convert_enum(hint, value, where)
    if dataclasses.is_dataclass(hint):
        return decode(hint, value, where=where)  # type: ignore[arg-type]
    return _convert_scalar(hint, value, where)


def _convert_tuple(args: tuple[Any, ...], value: object, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{where}: expected a list, found {show(value)}")
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_convert(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if len(value) != len(args):
        raise ValueError(f"{where}: expected {len(args)} items, found {len(value)}")
    return tuple(_convert(arg, item, f"{where}[{i}]") for i, (arg, item) in enumerate(zip(args, value, strict=True)))


def _convert_enum(hint: type[StrEnum], value: object, where: str) -> StrEnum:
    try:
        return hint(value)  # type: ignore[arg-type]
    except ValueError:
        raise ValueError(f"{where}: expected one of {', '.join(hint)}, found {show(value)}") from None


def _convert_scalar(hint: Any, value: object, where: str) -> Any:
    if type(value) is not hint and not (hint is float and type(value) is int):
        raise ValueError(f"{where}: expected {hint.__name__}, found {show(value)}")
    if type(value) is int and abs(value) > MAX_INT:
        raise ValueError(f"{where}: expected 64 bits, found {show(value)}")
    if type(value) is float and not math.isfinite(value):
        raise ValueError(f"{where}: expected a finite number, found {value}")
    return float(value) if hint is float else value  # type: ignore[arg-type]


def show(value: object) -> str:
    """A value as error texts quote it: in one line of at most 60 characters."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > MAX_INT:
        return f"an integer of {value.bit_length()} bits"
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
