"""The table of README.md: every case in question has a row, and every test of a row exists and says its case."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TABLE = Path(__file__).with_name("README.md").read_text()
CASES = (
    *("S1", "S3", "S5", "S8", "S9", "S11", "S13", "S17", "H1", "H3", "H7", "R1", "R2", "R4", "R5", "R22"),
    *("F1", "F3", "F4", "F5", "F8", "X1", "X2", "X4", "X6"),
)
ROWS = {
    case: (reported, re.findall(r"`([^`]+\.py)::([^`]+)`", tests))
    for case, reported, tests in re.findall(r"^\| (\w+) \| (.+?) \| (.+) \|$", TABLE, re.MULTILINE)
    if case != "case"
}


def functions(path: Path) -> dict[str, str]:
    """Test functions of a file, each with its docstring."""
    found = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
    return {node.name: ast.get_docstring(node) or "" for node in found if node.name.startswith("test_")}


def test_every_case_has_a_row_and_every_row_a_test() -> None:
    assert set(ROWS) >= set(CASES)
    assert not [case for case, (reported, tests) in ROWS.items() if not reported.strip() or not tests]


@pytest.mark.parametrize("case", ROWS)
def test_every_test_of_a_row_exists_and_says_its_case(case: str) -> None:
    for file, name in ROWS[case][1]:
        found = functions(TESTS / file)
        assert name in found, f"{file} has no {name}"
        assert re.search(rf"\b{case}\b", found[name]), f"{file}::{name} does not say {case} in its docstring"


def test_no_line_of_the_table_is_left_unread() -> None:
    assert len(ROWS) == sum(line.startswith("| ") for line in TABLE.splitlines()) - 1
