"""`make mutations`: is there a test for every way to break the trainer that the table knows?

    PYTHONPATH=tests python -m mutations.run [--only TEXT]

A copy of the tree is sabotaged in one line, the row's tests run there until the first failure, the line is put back.
First all of them run on the copy as it is: a test that fails anyway catches nothing. The work tree is never touched.

build/mutations.json   [{name, file, caught, by}]; by: the test that failed first, or what else ended the run
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mutations.table import PAGE, TABLE, Mutation, mutated, page, read_table

ROOT = Path(__file__).parents[2]
LIMIT_S = 600.0
PASSED, FAILED = 0, 1  # pytest's exit codes; any other is neither


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one row."""

    name: str
    file: str
    caught: bool
    by: str


class Copy:
    """A copy of the files git knows or would know, in a folder of its own."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        listing = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root, check=True, capture_output=True, text=True,
        )  # fmt: skip
        for name in filter(None, listing.stdout.split("\0")):
            source, target = root / name, folder / name
            if source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(source.read_bytes())
        self._check_imports()

    def pytest(self, tests: Sequence[str]) -> tuple[int | None, str]:
        """(exit code, output) of the tests up to the first failure; None after LIMIT_S."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", *tests]
        process = subprocess.Popen(
            command, cwd=self.folder, env=self._environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return None, ""
            raise
        return process.returncode, output

    def try_out(self, mutation: Mutation) -> Result:
        """Break, test, mend."""
        path = self.folder / mutation.file
        source = path.read_text()
        path.write_text(mutated(mutation, source))
        try:
            code, output = self.pytest(mutation.tests)
        finally:
            path.write_text(source)
        return Result(name=mutation.name, file=mutation.file, caught=code == FAILED, by=_ended_by(code, output))

    def _environment(self) -> dict[str, str]:
        paths = os.pathsep.join([str(self.folder), str(self.folder / "tests")])
        return {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}

    def _check_imports(self) -> None:
        """An installed trainer must not be taken for the copy: every sabotage would survive."""
        code = "import trainer; print(trainer.__file__)"
        found = subprocess.run(
            [sys.executable, "-c", code], cwd=self.folder, env=self._environment(), check=True, capture_output=True,
            text=True,
        ).stdout.strip()  # fmt: skip
        if not Path(found).is_relative_to(self.folder):
            raise RuntimeError(f"the copy in {self.folder} would be tested with {found}")


def _ended_by(code: int | None, output: str) -> str:
    failed = [
        line.split(" - ")[0].removeprefix("FAILED ") for line in output.splitlines() if line.startswith("FAILED ")
    ]
    if code == FAILED and failed:
        return failed[0]
    if code == PASSED:
        return "no test"
    last = output.strip().splitlines()[-3:]
    return f"no end within {LIMIT_S:.0f} s" if code is None else f"pytest's exit code {code}: {' | '.join(last)}"


def select(mutations: Sequence[Mutation], only: Sequence[str]) -> list[Mutation]:
    """The rows whose name or file holds one of `only`; all where it is empty."""
    return [m for m in mutations if not only or any(text in m.name or text in m.file for text in only)]


def run_all(mutations: Sequence[Mutation], folder: Path) -> list[Result] | None:
    """A result per row; None when a test fails on the copy as it is."""
    copy, start = Copy(ROOT, folder), time.monotonic()
    code, output = copy.pytest(list(dict.fromkeys(test for m in mutations for test in m.tests)))
    if code != PASSED:
        print(f"without any sabotage: {_ended_by(code, output)}")
        return None
    print(f"without any sabotage all tests pass ({time.monotonic() - start:.0f} s)", flush=True)
    results = []
    start = time.monotonic()
    for place, mutation in enumerate(mutations, 1):
        result = copy.try_out(mutation)
        results.append(result)
        left = (time.monotonic() - start) / place * (len(mutations) - place)
        mark = "caught" if result.caught else "SURVIVED"
        print(
            f"{place:3}/{len(mutations)} {mark:8} {result.name}  [{result.by}]  (left: {left / 60:.0f} min)", flush=True
        )
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 1 when a sabotage survives or a test fails without one; 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m mutations.run", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="rows whose name or file holds TEXT"
    )
    parser.add_argument("--table", action="store_true", help="write README.md from the table and run nothing")
    args = parser.parse_args(argv)
    mutations = read_table(TABLE.read_text())
    if args.table:
        PAGE.write_text(page(mutations))
        return 0
    chosen = select(mutations, args.only)
    if not chosen:
        parser.error(f"no row's name or file holds {' or '.join(args.only)}")
    try:
        with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
            results = run_all(chosen, Path(folder).resolve())
    except KeyboardInterrupt:
        print("\nstopped; nothing is left of the copy")
        return 130
    if results is None:
        return 1
    if not args.only:
        (ROOT / "build").mkdir(exist_ok=True)
        (ROOT / "build" / "mutations.json").write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n")
    survivors = [result.name for result in results if not result.caught]
    print(f"{len(results) - len(survivors)} of {len(results)} caught" + "".join(f"\nSURVIVED: {n}" for n in survivors))
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
