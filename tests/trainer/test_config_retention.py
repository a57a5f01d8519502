"""checkpoints.keep_last and keep_every: what is refused, and what is said."""

from pathlib import Path

import pytest
import tiny_run
import yaml

from trainer.config import Severity, load


def problems(tmp_path: Path, severity: Severity, **keys: int) -> list[str]:
    path = tiny_run.make(tmp_path)
    config = yaml.safe_load(path.read_text())
    config["checkpoints"] |= keys
    path.write_text(yaml.safe_dump(config))
    found = (problem for problem in load(path).problems if problem.key.startswith("checkpoints."))
    return [f"{problem.key}: {problem.message}" for problem in found if problem.severity is severity]


@pytest.mark.parametrize("keys", [{"keep_last": 0}, {"keep_last": 1}, {"keep_every": 0}, {"keep_every": -5}])
def test_numbers_that_would_lose_checkpoints_are_refused(keys: dict[str, int], tmp_path: Path) -> None:
    (key,) = keys
    (error,) = problems(tmp_path, Severity.ERROR, **keys)
    assert error.startswith(f"checkpoints.{key}: ")


def test_a_keep_every_between_the_saves_says_when_it_bites(tmp_path: Path) -> None:
    assert problems(tmp_path, Severity.WARNING, keep_every=9) == []
    (warning,) = problems(tmp_path, Severity.WARNING, keep_every=10)
    assert "no multiple of checkpoint_interval 3: only every 30 steps a checkpoint meets it" in warning
