"""Epochs: who wrote this, and is it still allowed to count?

    run → attempt (one Slurm job) → cycle (one launch inside it);   epoch = (attempt, generation, cycle)

Attempts, generations and cycles count from 1; order is tuple order. The text form `a0003g01c0002` stands in the names
of checkpoints, so that two writers never share a name. Without a cycle file a launch writes under `PLAIN_EPOCH`.
"""

import re
from dataclasses import dataclass

_TEXT = re.compile(r"a(\d{4,9})g(\d{2,9})c(\d{4,9})", re.ASCII)
_FIELDS = ("attempt", "generation", "cycle")


@dataclass(frozen=True, slots=True, order=True)
class Epoch:
    """(attempt, generation, cycle), the fencing token of everything a launch writes."""

    attempt: int
    generation: int
    cycle: int

    @property
    def text(self) -> str:
        """For example a0003g01c0002."""
        return f"a{self.attempt:04d}g{self.generation:02d}c{self.cycle:04d}"

    def __str__(self) -> str:
        return self.text

    @staticmethod
    def parse(text: str) -> "Epoch | None":
        """The inverse of `text`; None when it is no epoch, or one that is written in another way."""
        match = _TEXT.fullmatch(text)
        if match is None:
            return None
        epoch = Epoch(*(int(part) for part in match.groups()))
        return epoch if epoch.text == text else None

    @classmethod
    def from_json(cls, data: object) -> "Epoch":
        """From {"attempt", "generation", "cycle"} (records) or [a, g, c] (ledger). Raises ValueError."""
        if isinstance(data, dict):
            data = [data.get(name) for name in _FIELDS]
        if not isinstance(data, list) or len(data) != 3:
            raise ValueError(f"epoch: expected attempt, generation and cycle, found {data!r}")
        if any(type(part) is not int or part < 0 for part in data):
            raise ValueError(f"epoch: expected three integers from 0, found {data!r}")
        return cls(*data)

    def to_list(self) -> list[int]:
        return [self.attempt, self.generation, self.cycle]


PLAIN_EPOCH = Epoch(0, 0, 0)
