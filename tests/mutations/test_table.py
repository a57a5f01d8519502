"""The table of sabotages stays true: every row applies to today's code, changes it, and names tests that exist."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from mutations import run
from mutations.run import Copy, Result, select
from mutations.table import PAGE, TABLE, Mutation, TableError, mutated, page, read_table

ROOT = Path(__file__).parents[2]
MUTATIONS = read_table(TABLE.read_text())


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_row_applies_once_and_changes_the_code(mutation: Mutation) -> None:
    source = (ROOT / mutation.file).read_text()
    assert ast.dump(ast.parse(mutated(mutation, source))) != ast.dump(ast.parse(source))


def test_every_test_that_a_row_names_exists() -> None:
    named = {test for mutation in MUTATIONS for test in mutation.tests}
    files = sorted({test.partition("::")[0] for test in named})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    found = set(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines())
    found |= {test.partition("[")[0] for test in found} | set(files)
    assert not named - found


def test_there_are_enough_of_them() -> None:
    assert len(MUTATIONS) >= 25


def test_the_page_is_that_of_the_table() -> None:
    assert PAGE.read_text() == page(MUTATIONS), "make mutations-table writes it"


def row(**changes: object) -> Mutation:
    plain: dict[str, object] = {"name": "a", "file": "f.py", "old": "x", "new": "y", "tests": ("t",)}
    return Mutation(**{**plain, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(("source", "count"), [("z = 1", 0), ("x = x", 2)])
def test_a_pattern_that_is_not_there_once_is_an_error(source: str, count: int) -> None:
    with pytest.raises(TableError, match=f"'a' looks for 'x' in f.py and finds it {count} times"):
        mutated(row(), source)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[mutation]]\nname = 'a'\nfile = 'f'\nold = 'x'\ntests = ['t']", "row a: .*'new'"),
        ("[[mutation]]\nname = 'a'\nfile = 'f'\nold = 'x'\nnew = 'y'\ntests = []", "row a names no test"),
        ("[[mutation]]\nname = 'a'\nfile = 'f'\nold = 'x'\nnew = 'y'\ntests = ['t']\n" * 2, "two rows are called a"),
    ],
)
def test_a_wrong_row_is_named(text: str, says: str) -> None:
    with pytest.raises(TableError, match=says):
        read_table(text)


def test_rows_are_chosen_by_name_or_file() -> None:
    rows = [row(), row(name="b", file="trainer/g.py")]
    assert select(rows, []) == rows and select(rows, ["trainer/"]) == rows[1:] and select(rows, ["a"]) == rows


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that is a package `trainer` of one line with two tests, and no git."""

    def little(self: Copy, root: Path, folder: Path) -> None:
        self.folder = folder
        (folder / "trainer").mkdir()
        (folder / "trainer" / "__init__.py").write_text("x = 1\n")
        (folder / "test_x.py").write_text("import trainer\n\ndef test_x():\n    assert trainer.x == 1\n")
        (folder / "test_y.py").write_text("def test_y():\n    pass\n")

    monkeypatch.setattr(Copy, "__init__", little)
    return tmp_path


def test_what_a_test_notices_is_caught_and_what_none_does_survives(tree: Path) -> None:
    def break_x(new: str, test: str) -> Mutation:
        return row(name=new, file="trainer/__init__.py", old="x = 1", new=new, tests=(test,))

    rows = [break_x("x = 2", "test_x.py"), break_x("x = 3", "test_y.py"), break_x("x = (", "test_x.py")]
    results = run.run_all(rows, tree)
    assert results is not None
    assert results[0] == Result(name="x = 2", file="trainer/__init__.py", caught=True, by="test_x.py::test_x")
    assert (results[1].caught, results[1].by) == (False, "no test")
    assert not results[2].caught and "exit code 2" in results[2].by, "a file that does not load is no sabotage"
    assert (tree / "trainer" / "__init__.py").read_text() == "x = 1\n"


def test_a_test_that_fails_anyway_catches_nothing(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(file="trainer/__init__.py", old="x = 1", new="x = 2", tests=("test_z.py",))]
    assert run.run_all(rows, tree) is None and "without any sabotage: pytest's exit code" in capsys.readouterr().out
