"""Both packages read YAML by the same text of code, because neither may import the other."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["yaml_loader.py", "typed.py", "tree.py", "problems.py", "secret_names.py"])
def test_the_copies_are_byte_identical(name: str) -> None:
    trainer, orchestrator = (ROOT / package / "config" / name for package in ("trainer", "orchestrator"))
    assert trainer.read_bytes() == orchestrator.read_bytes()
