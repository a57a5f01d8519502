"""Choosing where to go on without an orchestrator: the newest checkpoint that verifies, and a free way for the next.

Launches without a cycle file share one epoch, so what an earlier one left half-written or damaged bears the very name
a later save needs. It is renamed to `.quarantine-…`, where nobody loads it and a person can look; nothing is deleted.
"""

from pathlib import Path

from trainer.checkpoint.verify import choose_newest
from trainer.records import UNSUPERVISED


def choose_and_clear(directory: Path) -> tuple[str | None, tuple[str, ...]]:
    """(name of the newest checkpoint that verifies or None, one sentence for each entry passed over).

    To be called by one rank, while no other launch trains in this directory. Raises OSError.
    """
    choice = choose_newest(directory)
    for rejected in choice.rejected:
        if UNSUPERVISED.text in rejected.name:
            set_aside(directory / rejected.name)
    return (None if choice.path is None else choice.path.name), tuple(rejected.reason for rejected in choice.rejected)


def set_aside(path: Path) -> Path:
    """Rename an entry of checkpoints/ out of the way; returns its new place."""
    wanted = path.with_name(f".quarantine-{path.name.removeprefix('.').removesuffix('.partial')}")
    target, number = wanted, 1
    while target.exists():
        number += 1
        target = wanted.with_name(f"{wanted.name}-{number}")
    return path.rename(target)
