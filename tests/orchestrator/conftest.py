"""What the tests of the commands share: a config, a stub sbatch, a local launcher that starts nothing."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import slurm_stubs as stubs
from submit_world import CONFIG, Started

from orchestrator.config import check
from orchestrator.control import launch_local
from orchestrator.state.rundir import RunPaths


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small token folder, made by the public commands."""
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("\n".join(f"the quick brown fox number {i} jumps" for i in range(300)))
    trainer = [sys.executable, "-m", "trainer", "data"]
    train = ["tokenizer", "train", "--input", "text/a.txt", "--vocab-size", "300", "--out", "tokenizer"]
    prepare = ["prepare", "--input", "text", "--tokenizer", "tokenizer", "--out", "data"]
    for words in (train, prepare):
        subprocess.run([*trainer, *words], cwd=folder, check=True, capture_output=True, timeout=120)
    return folder / "data"


@pytest.fixture(scope="session")
def answers() -> dict[tuple[object, ...], dict[str, Any]]:
    """The trainer's answers by question: asking it costs a process, and most tests ask the same."""
    return {}


@pytest.fixture
def config(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: dict[tuple[object, ...], dict[str, Any]]
) -> Path:
    """A config file; the current folder is another one, and empty."""
    path = tokens.parent / "run.yaml"
    path.write_text(CONFIG.replace("DATA", str(tokens)))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    ask = check.ask_trainer

    def ask_once(
        config: Path, *, overrides: tuple[str, ...], site: Path | None, here: bool, cwd: Path | None = None
    ) -> dict[str, Any]:
        question = (config.name, config.read_text(), overrides, site, here, cwd)
        if question not in answers:
            answers[question] = ask(config, overrides=overrides, site=site, here=here, cwd=cwd)
        return answers[question]

    monkeypatch.setattr(check, "ask_trainer", ask_once)
    return path


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stub sbatch on PATH; the folder where it notes what it saw."""
    bin_dir = stubs.install(tmp_path / "slurm", reply="Quota 42% used.\n4711;cluster")
    monkeypatch.setenv("PATH", f"{bin_dir}:/usr/bin:/bin")
    return tmp_path / "slurm"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Plans and environments that the local launcher was asked to start; nothing is started."""
    calls: Started = []

    def start(paths: RunPaths, plan: Mapping[str, Any], *, env: Mapping[str, str] | None = None) -> int:
        calls.append((plan, env or {}))
        return 4242

    monkeypatch.setattr(launch_local, "start_attempt", start)
    return calls
