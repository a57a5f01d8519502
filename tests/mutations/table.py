"""The table of sabotages: mutations.toml as typed rows, and as the page that README.md is."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("mutations.toml")
PAGE = Path(__file__).with_name("README.md")


class TableError(ValueError):
    """A row that cannot be applied; the text says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """Replace `old`, which stands once in `file`, by `new`; one of `tests` (pytest ids) must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def read_table(text: str) -> tuple[Mutation, ...]:
    """Raises TableError for a row of another shape or a name that stands twice."""
    rows = tomllib.loads(text)["mutation"]
    mutations = tuple(_row(row) for row in rows)
    names = [mutation.name for mutation in mutations]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise TableError(f"{TABLE.name}: two rows are called {', '.join(twice)}")
    return mutations


def _row(row: dict[str, Any]) -> Mutation:
    try:
        mutation = Mutation(**{**row, "tests": tuple(row["tests"])})
    except (TypeError, KeyError) as error:
        raise TableError(
            f"{TABLE.name}: row {row.get('name', row)}: {error}; it has name, file, old, new, tests"
        ) from error
    if not mutation.tests:
        raise TableError(f"{TABLE.name}: row {mutation.name} names no test")
    return mutation


def mutated(mutation: Mutation, source: str) -> str:
    """`source` of the file with the change in it. Raises TableError unless `old` stands there exactly once."""
    count = source.count(mutation.old)
    if count != 1:
        raise TableError(
            f"{TABLE.name}: '{mutation.name}' looks for {mutation.old!r} in {mutation.file} and finds it {count} "
            "times; write the line as it is now, or drop the row if what it breaks is gone."
        )
    return source.replace(mutation.old, mutation.new)


def page(mutations: tuple[Mutation, ...]) -> str:
    """README.md."""
    head = (
        "# Sabotages\n\nOne-line faults of the trainer, each with the smallest tests that must notice it; made from\n"
        "`mutations.toml` by `make mutations-table`. `make mutations` applies them one by one to a copy of the tree\n"
        "and writes `build/mutations.json`; one that no test notices is a missing test.\n\nTo add one: a row in "
        "`mutations.toml`, then `make mutations-table`. `old` must stand exactly once in its file.\n\n"
        "| sabotage | file | tests |\n|---|---|---|\n"
    )
    lines = (f"| {m.name} | `{m.file}` | {'<br>'.join(f'`{short(test)}`' for test in m.tests)} |" for m in mutations)
    return head + "\n".join(lines) + "\n"


def short(test: str) -> str:
    """A pytest id relative to tests/."""
    return test.removeprefix("tests/")
