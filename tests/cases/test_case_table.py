"""The tables of README.md: every case and trap in question has a row, every test of a row exists and says its case."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TABLE = Path(__file__).with_name("README.md").read_text()
CASES = (
    *("S1", "S3", "S5", "S8", "S9", "S11", "S13", "S17", "H1", "H3", "H7"),
    *("R1", "R2", "R4", "R5", "R8", "R12", "R20", "R22"),
    *("C1", "C2", "C3", "C5", "C7", "C8", "C11", "C13"),
    *("F1", "F3", "F4", "F5", "F8", "X1", "X2", "X4", "X6"),
    *("P1", "P2", "P3", "P4", "P6", "P9", "P10", "P14", "P16", "R7", "D5"),
)
TRAPS = (
    *("L1", "L2", "L3", "L7", "L8", "L9", "T1", "T2", "T3", "T4", "T5", "T6", "T7", "T8", "T9", "T12"),
    *("G1", "G3", "G4", "G5", "G6", "G7", "G8", "W1", "W2", "W3", "W4", "W5"),
)
HEADS = ("case", "trap")
ROWS = {
    case: (reported, re.findall(r"`([^`]+\.py)::([^`]+)`", tests))
    for case, reported, tests in re.findall(r"^\| (\w+) \| (.+?) \| (.+) \|$", TABLE, re.MULTILINE)
    if case not in HEADS
}


def functions(path: Path) -> dict[str, str]:
    """Test functions of a file, each with its docstring."""
    found = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
    return {node.name: ast.get_docstring(node) or "" for node in found if node.name.startswith("test_")}


def test_every_case_has_a_row_and_every_row_a_test() -> None:
    assert set(ROWS) >= {*CASES, *TRAPS}
    assert not [case for case, (reported, tests) in ROWS.items() if not reported.strip() or not tests]


@pytest.mark.parametrize("case", ROWS)
def test_every_test_of_a_row_exists_and_says_its_case(case: str) -> None:
    for file, name in ROWS[case][1]:
        found = functions(TESTS / file)
        assert name in found, f"{file} has no {name}"
        assert re.search(rf"\b{case}\b", found[name]), f"{file}::{name} does not say {case} in its docstring"


def test_no_line_of_the_table_is_left_unread() -> None:
    assert len(ROWS) == sum(line.startswith("| ") for line in TABLE.splitlines()) - len(HEADS)
