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


def test_every_folder_with_tests_has_a_group(pytestconfig: pytest.Config) -> None:
    conftest = (TESTS / "conftest.py").read_text()
    folders = {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")}
    assert all(f'"{folder}":' in conftest for folder in folders), f"a folder of {folders} has no group in conftest.py"
