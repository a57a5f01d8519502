"""Numbers as people read them: with units, three figures at most, and a dash for what is unknown."""

import dataclasses
import re
import time
from enum import Enum
from typing import Any, TypeVar

from orchestrator.words import plural as plural

T = TypeVar("T")
UNKNOWN = "—"
_SI = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


# CSI … letter, OSC … BEL or ST, other escapes of two characters; their eight-bit forms; then whatever is left of them.
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]"
)
# Controls, what turns the direction of writing, and halves of characters, which no terminal takes.
_HARMFUL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def harmless(text: str) -> str:
    """Text from a file as one line that a terminal only shows: no control sequences, which it might obey.

    Line feeds and other controls become spaces; escape sequences vanish. All foreign text that people see passes
    through here: log lines one by one, a RunView as a whole when it is built, errors when they are printed.
    """
    return _HARMFUL.sub(" ", _SEQUENCE.sub("", text))


def harmless_lines(text: str) -> str:
    """The same for text of several lines, which stay."""
    return "\n".join(harmless(line) for line in text.split("\n"))


def harmless_data(record: T) -> T:
    """The same for every text in a frozen record, however deep; numbers, None and enum members stay as they are."""
    return _harmless(record)  # type: ignore[no-any-return]


def _harmless(value: Any) -> Any:
    if isinstance(value, str):
        return value if isinstance(value, Enum) else harmless(value)
    if isinstance(value, tuple):
        return tuple(_harmless(item) for item in value)
    if isinstance(value, dict):
        return {_harmless(key): _harmless(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {field.name: _harmless(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **changed)
    return value


def duration(seconds: float | None) -> str:
    """0.42 s · 7.1 s · 3 min 20 s · 2 h 05 min · 4 d 3 h"""
    if seconds is None:
        return UNKNOWN
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def count(value: float | None) -> str:
    """950 · 4,096 · 1.34 M · 12.6 G"""
    if value is None:
        return UNKNOWN
    if abs(value) < 100_000:
        return f"{value:,.0f}"
    return _scaled(value, 1.0)


def size(value: float | None) -> str:
    """640 B · 16.0 MB (decimal, as disks are sold)"""
    if value is None:
        return UNKNOWN
    return f"{value:.0f} B" if abs(value) < 1000 else f"{_scaled(value, 1.0)}B"


def rate(value: float | None, unit: str = "tokens/s") -> str:
    """8,192 tokens/s · 1.25 M tokens/s"""
    return UNKNOWN if value is None else f"{count(value)} {unit}"


def ratio(value: float | None) -> str:
    """41.3 %"""
    return UNKNOWN if value is None else f"{100 * value:.1f} %"


def number(value: float | None, digits: int = 4) -> str:
    """A plain number with that many significant digits: 3.0619 → 3.062, 0.003 → 0.003, 3e-05."""
    return UNKNOWN if value is None else f"{value:.{digits}g}"


def loss(value: float | None) -> str:
    """3.0619"""
    return UNKNOWN if value is None else f"{value:.4f}"


def moment(unix: float | None) -> str:
    """Local time, to the second."""
    return UNKNOWN if unix is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix))


def moment_utc(unix: float | None) -> str:
    """UTC, to the second."""
    return UNKNOWN if unix is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(unix))


def _scaled(value: float, floor: float) -> str:
    for factor, letter in _SI:
        if abs(value) >= factor * floor:
            scaled = value / factor
            return f"{scaled:.{0 if abs(scaled) >= 100 else 1 if abs(scaled) >= 10 else 2}f} {letter}"
    return f"{value:,.0f} "
