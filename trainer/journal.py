"""What rank 0 writes down: train.jsonl, validation.jsonl and the console. Other ranks keep none.

Each line is flushed as it is written. A kill can tear the last one; readers leave a line without its newline out. The
line of a step that is saved is synced: a node that dies takes its page cache along, and a step that a checkpoint covers
is never trained again.
"""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from trainer.console import is_due, step_text, validation_text
from trainer.records import TrainLine, ValidationLine, to_json


class Journal:
    """The journal of one cycle. `cycle_dir` None: a rank that keeps none. `compile_s`: what its first line says."""

    def __init__(self, cycle_dir: Path | None, *, print_interval: int, compile_s: float | None = None) -> None:
        self._cycle_dir, self._compile_s = cycle_dir, compile_s
        self._print_interval = print_interval
        self._train: TextIO | None = None

    def __enter__(self) -> Self:
        if self._cycle_dir is not None:
            self._train = (self._cycle_dir / "train.jsonl").open("a", encoding="utf-8")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._train is not None:
            self._train.close()

    def step(self, line: TrainLine, *, train_steps: int) -> None:
        """Append a step, and print it when it is its turn."""
        if self._train is None:
            return
        line, self._compile_s = replace(line, compile_s=self._compile_s), None
        self._train.write(to_json(line) + "\n")
        self._train.flush()
        if line.save_s is not None:
            os.fsync(self._train.fileno())
        if is_due(line.step, interval=self._print_interval, train_steps=train_steps):
            print(step_text(line, train_steps=train_steps), flush=True)

    def validation(self, line: ValidationLine) -> None:
        """Append a validation pass, synced, and print it: only what is not on record is measured again."""
        if self._cycle_dir is None:
            return
        with (self._cycle_dir / "validation.jsonl").open("a", encoding="utf-8") as file:
            file.write(to_json(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        print(validation_text(line), flush=True)


def validated(run_dir: Path, step: int) -> bool:
    """Whether any launch of the run has a whole validation line for `step`. Raises OSError."""
    for file in run_dir.glob("attempts/*/cycles/*/validation.jsonl"):
        whole, _, _ = file.read_text(encoding="utf-8").rpartition("\n")
        if any(json.loads(line)["step"] == step for line in whole.splitlines()):
            return True
    return False
