"""Run directories as wholes: the stories the views are tested on follow the schemas that real runs follow."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import run_factory
import run_stories
from run_dir_schemas import problems


@pytest.mark.parametrize("story", [run_stories.clean, run_stories.rough, run_stories.crash_loop])
def test_every_record_of_a_story_follows_its_schema(tmp_path: Path, story: Callable[[], run_factory.Story]) -> None:
    run_dir = story().write(tmp_path)
    assert list(run_dir.glob("ledger/*.jsonl"))
    # A story has no weights, so its manifests list no files; real ones are in test_contract_trainer.py.
    assert [problem for problem in problems(run_dir) if not problem.startswith("checkpoints/")] == []


def test_a_record_that_does_not_follow_is_found(tmp_path: Path) -> None:
    run_dir = run_stories.clean().write(tmp_path)
    ledger = next(run_dir.glob("ledger/*.jsonl"))
    first = json.loads(ledger.read_text().splitlines()[0])
    ledger.write_text(json.dumps({**first, "data": {}}) + "\n" + '{"torn')
    assert any(problem.startswith(f"ledger/{ledger.name}:1: $.data: ") for problem in problems(run_dir))
