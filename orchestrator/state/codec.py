"""Dataclass ↔ flat JSON, with every doubt reported.

A record is a frozen dataclass whose annotations are the schema: `decode` checks each field against them, ignores
unknown fields (a newer writer may add some), and names the field, what it expected and what it found. Numbers are not
coerced: `true` is no integer and `"3"` is no number. Supported: bool int float str, `X | None`, tuples, `dict[str, X]`,
StrEnums, nested dataclasses (one with a `from_json` classmethod decodes itself) and `Any`.
"""

import dataclasses
import json
import types
from collections.abc import Hashable
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

R = TypeVar("R")

_MISSING: Any = dataclasses.MISSING


@cache
def _hints(cls: Hashable) -> dict[str, Any]:
    return get_type_hints(cls)


def decode(cls: type[R], data: object, *, where: str = "record") -> R:
    """The record `cls` of JSON object `data`. Raises ValueError naming the first field that does not fit."""
    by_hand = getattr(cls, "from_json", None)
    if by_hand is not None:
        return by_hand(data)  # type: ignore[no-any-return]
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected an object, found {_show(data)}")
    hints = _hints(cls)  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name in data:
            values[field.name] = _convert(hints[field.name], data[field.name], f"{where}.{field.name}")
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
            raise ValueError(f"{where}: expected an object, found {_show(value)}")
        return {str(key): _convert(args[1], item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return _convert_enum(hint, value, where)
    if dataclasses.is_dataclass(hint):
        return decode(hint, value, where=where)  # type: ignore[arg-type]
    return _convert_scalar(hint, value, where)


def _convert_tuple(args: tuple[Any, ...], value: object, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{where}: expected a list, found {_show(value)}")
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_convert(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if len(value) != len(args):
        raise ValueError(f"{where}: expected {len(args)} items, found {len(value)}")
    return tuple(_convert(arg, item, f"{where}[{i}]") for i, (arg, item) in enumerate(zip(args, value, strict=True)))


def _convert_enum(hint: type[StrEnum], value: object, where: str) -> StrEnum:
    try:
        return hint(value)  # type: ignore[arg-type]
    except ValueError:
        raise ValueError(f"{where}: expected one of {', '.join(hint)}, found {_show(value)}") from None


def _convert_scalar(hint: Any, value: object, where: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        raise ValueError(f"{where}: expected {hint.__name__}, found {_show(value)}")
    return value


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
