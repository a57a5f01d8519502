"""Findings about a config: collected, never raised one at a time, each with the line it is about.

    Node ──typed──▶ value | Finding ──located──▶ Problem ──▶ "run.yaml:12: error: parallelism.tp: …"

This file exists twice, byte for byte (trainer and orchestrator share no code; a contract test compares them).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum


class Severity(StrEnum):
    """`error` stops, `warning` is said, `unchecked` could not be seen on this machine."""

    ERROR = "error"
    WARNING = "warning"
    UNCHECKED = "unchecked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One finding. `line` counts from 1 (0: the finding is about no line); `found` and `expected` are for people."""

    severity: Severity
    file: str
    line: int
    key: str
    found: str | None
    expected: str | None
    message: str

    def as_dict(self) -> dict[str, object]:
        """Plain data for `--json`."""
        return {
            "severity": self.severity.value,
            "file": self.file,
            "line": self.line,
            "key": self.key,
            "found": self.found,
            "expected": self.expected,
            "message": self.message,
        }


def problem_from_dict(data: dict[str, object]) -> Problem:
    """The inverse of `Problem.as_dict`; raises KeyError or ValueError on a shape that is not one."""
    line = data["line"]
    found, expected = data.get("found"), data.get("expected")
    return Problem(
        severity=Severity(str(data["severity"])),
        file=str(data["file"]),
        line=line if isinstance(line, int) else 0,
        key=str(data["key"]),
        found=None if found is None else str(found),
        expected=None if expected is None else str(expected),
        message=str(data["message"]),
    )


def format_problem(problem: Problem) -> str:
    """One line for a terminal; control characters in what was found are shown escaped."""
    where = f"{problem.file}:{problem.line}" if problem.line else problem.file
    parts = [f"{where}: {problem.severity}: "]
    if problem.key:
        parts.append(f"{problem.key}: ")
    parts.append(problem.message)
    details = []
    if problem.found is not None:
        details.append(f"found {shorten(problem.found)}")
    if problem.expected is not None:
        hint = problem.expected.endswith("?")
        details.append(problem.expected if hint else f"expected {problem.expected}")
    if details:
        parts.append(f" ({'; '.join(details)})")
    return "".join(parts)


def quoted(value: str) -> str:
    """A value as `found` shows it: text in quotes, numbers and true, false, null as they stand."""
    return value if _BARE.fullmatch(value) else f"'{value}'"


_BARE = re.compile(r"[+-]?(\d[\d_]*)?\.?\d+([eE][+-]?\d+)?|true|false|null|~", re.IGNORECASE | re.ASCII)


def shorten(text: str, limit: int = 80) -> str:
    """`text` as shown to a person: one line, control characters escaped, at most `limit` characters."""
    shown = "".join(ch if ch.isprintable() else ch.encode("unicode_escape").decode("ascii") for ch in text)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """What was expected instead of the unknown `word`: the nearest known name, else the list of them."""
    names = sorted(known)
    near = nearest(word, names)
    if near is not None:
        return f"did you mean '{near}'?"
    return "one of " + ", ".join(names) if names else "no key here"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name that `word` probably was to be; None when none is close."""
    lowered = {name.lower(): name for name in known}
    near = get_close_matches(word.lower(), lowered, n=1, cutoff=0.6)
    return lowered[near[0]] if near else None


def has_errors(problems: Iterable[Problem]) -> bool:
    """Whether any of them forbids going on."""
    return any(problem.severity is Severity.ERROR for problem in problems)
