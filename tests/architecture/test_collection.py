"""No folder of tests is left out without a word: pytest skips names such as `dist` unless told otherwise."""

from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def test_every_folder_with_tests_is_entered(pytestconfig: pytest.Config) -> None:
    ignored = pytestconfig.getini("norecursedirs")
    for path in TESTS.rglob("test_*.py"):
        for part in path.parent.relative_to(TESTS).parts:
            assert not any(fnmatch(part, pattern) for pattern in ignored), f"pytest never enters {path.parent}"


def test_make_test_runs_every_folder_with_tests_once() -> None:
    lines = (TESTS.parent / "Makefile").read_text().splitlines()
    runs = [word for line in lines if line.startswith(("SIDE_BY_SIDE", "ONE_BY_ONE")) for word in line.split()[2:]]
    folders = {path.relative_to(TESTS.parent).parts[:2] for path in TESTS.rglob("test_*.py")}
    assert sorted(runs) == sorted("/".join(parts) for parts in folders)
