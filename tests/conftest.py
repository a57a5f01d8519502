"""Shared by all tests: minutes per group at the end, golden files, and a clean environment.

The shares of a full run are in CONTRIBUTING.md.
"""

import os
from collections import defaultdict
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

# Tiny tensors: a second thread only waits for the first (ten times slower on a busy machine). Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

TESTS = Path(__file__).parent
GROUPS = (  # the first that fits
    ("*/test_checkpoint_*", "checkpoints"),
    ("e2e/test_train_*", "checkpoints"),  # trainers alone or under torchrun: kill, drain, load elsewhere
    ("e2e/test_fork*", "checkpoints"),
    ("e2e/test_copies*", "checkpoints"),
    ("e2e/test_finetune*", "checkpoints"),
    ("e2e/test_demo_*", "demo and kill/resume"),
    ("orchestrator/test_supervise_live*", "demo and kill/resume"),  # real supervisor and agents, every kind of death
    ("e2e/test_kill_resume*", "demo and kill/resume"),
    ("e2e/test_abandoned*", "demo and kill/resume"),
    ("dist/*", "oracle"),
    ("cases/*", "public files"),
    ("*", "unit"),
)
_seconds: dict[str, float] = defaultdict(float)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    file = report.fspath.removeprefix("tests/")
    _seconds[next(group for pattern, group in GROUPS if fnmatchcase(file, pattern))] += report.duration


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
