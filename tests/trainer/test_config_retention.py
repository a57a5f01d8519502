"""checkpoints.keep_last, keep_every, export_interval and upload_to: what is refused, and what is said."""

from pathlib import Path

import pytest
import tiny_run
import yaml

from trainer.config import Severity, load


def problems(tmp_path: Path, severity: Severity, **keys: object) -> list[str]:
    path = tiny_run.make(tmp_path)
    config = yaml.safe_load(path.read_text())
    config["checkpoints"] |= keys
    path.write_text(yaml.safe_dump(config))
    found = (problem for problem in load(path).problems if problem.key.startswith("checkpoints."))
    return [f"{problem.key}: {problem.message}" for problem in found if problem.severity is severity]


@pytest.mark.parametrize(
    "keys",
    [
        {"keep_last": 0},
        {"keep_last": 1},
        {"keep_every": 0},
        {"keep_every": -5},
        {"export_interval": 0},
        {"upload_to": "copies/here"},
        {"upload_to": ""},
        {"upload_to": "s3://"},
        {"upload_to": "file:///tmp/a\nb"},
    ],
)
def test_numbers_that_would_lose_checkpoints_are_refused(keys: dict[str, object], tmp_path: Path) -> None:
    (key,) = keys
    (error,) = problems(tmp_path, Severity.ERROR, **keys)
    assert error.startswith(f"checkpoints.{key}: ")


@pytest.mark.parametrize("key", ["keep_every", "export_interval"])
def test_an_interval_between_the_saves_says_when_it_bites(key: str, tmp_path: Path) -> None:
    assert problems(tmp_path, Severity.WARNING, **{key: 9}) == []
    (warning,) = problems(tmp_path, Severity.WARNING, **{key: 10})
    assert "no multiple of checkpoint_interval 3: only every 30 steps a checkpoint meets it" in warning


def test_copies_go_to_a_url(tmp_path: Path) -> None:
    assert problems(tmp_path, Severity.ERROR, upload_to="s3://bucket/runs") == []


@pytest.mark.parametrize("url", ["s3://key:secret@bucket/x", "s3://token@bucket", "https://h/x?sig=secret"])
def test_a_secret_in_the_url_is_refused_and_not_shown(url: str, tmp_path: Path) -> None:
    (error,) = problems(tmp_path, Severity.ERROR, upload_to=url)
    assert "no user, password or query" in error and "secret" not in error and "token" not in error
