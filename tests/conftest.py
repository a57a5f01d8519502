"""Shared by all tests: minutes per group at the end, golden files, and a clean environment.

A group is a top folder of tests/; the shares of a full run are in CONTRIBUTING.md.
"""

import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

# Tiny tensors: a second thread only waits for the first (ten times slower on a busy machine). Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

TESTS = Path(__file__).parent
GROUPS = {
    "architecture": "unit",
    "contract": "unit",
    "orchestrator": "unit",
    "trainer": "unit",
    "dist": "oracle",
    "mutations": "unit",
    "e2e": "demo and kill/resume",
    "cases": "public files",
}
_seconds: dict[str, float] = defaultdict(float)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    folder = Path(report.fspath).parts
    name = folder[1] if len(folder) > 1 else "other"
    _seconds[GROUPS.get(name, name)] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    at_once = len(terminalreporter.config.getoption("tx", None) or [None])  # processes that tests are shared out to
    terminalreporter.write_sep("-", "minutes per group" + (f", {at_once} tests at once" if at_once > 1 else ""))
    for group, seconds in sorted(_seconds.items()):
        terminalreporter.write_line(f"{group:<24}{seconds / 60 / at_once:6.2f} min")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the person's site file, run folder or an enclosing Slurm job."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "SBATCH_", "PAWL_")) and name != "PAWL_GOLDEN":
            monkeypatch.delenv(name)
    monkeypatch.setenv("PAWL_SITE", str(TESTS / "fixtures" / "no-site.yaml"))


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Compare text with tests/golden/NAME; `make golden` rewrites the file instead."""

    def compare(name: str, text: str) -> None:
        path = TESTS / "golden" / name
        if os.environ.get("PAWL_GOLDEN") == "write":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"no golden file {path}; make golden writes it"
        assert text == path.read_text(), f"differs from {path}; if the change is meant: make golden, and read the diff"

    return compare
