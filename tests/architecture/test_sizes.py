"""A reader's limits: files under 400 lines, functions under 60, no leftovers, nothing about one machine."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = [p for d in ("orchestrator", "trainer", "ops") for p in sorted((ROOT / d).rglob("*.py"))]
TEXT = [
    p
    for d in ("orchestrator", "trainer", "ops", "configs", "slurm_templates", "tests")
    for p in sorted((ROOT / d).rglob("*"))
    if p.is_file() and p.suffix in {".py", ".md", ".yaml", ".json", ".j2", ".sh", ".txt"}
] + [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def test_files_fit_one_reading() -> None:
    long = {str(p.relative_to(ROOT)): n for p in CODE if (n := len(p.read_text().splitlines())) > 400}
    assert not long, f"over 400 lines: {long}"


def test_functions_fit_one_screen() -> None:
    long = []
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                lines = node.end_lineno - node.lineno + 1
                if lines > 60:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {lines}")
    assert not long, f"over 60 lines: {long}"


def test_no_swallowed_errors() -> None:
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler):
                bare = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
                silent = all(isinstance(s, ast.Pass) for s in node.body)
                assert not (bare and silent), f"{path}:{node.lineno} swallows every error"


def test_no_leftovers_and_no_machine_paths() -> None:
    homes = "|".join(("/wo" + "rk/", "/ro" + "ot/"))
    words = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")) + rf")\b|(?<![\w.])({homes})")
    found = [
        f"{p.relative_to(ROOT)}: {m.group(0)}" for p in TEXT for m in [words.search(p.read_text(errors="replace"))] if m
    ]
    assert not found, found
