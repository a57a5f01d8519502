"""RUN@STEP: how a person names one checkpoint. The one place that takes such a text apart; pure.

    demo                                     the run
    demo@4000                                its checkpoint of step 4000 that counts
    demo@step-000004000.a0001g01c0001        exactly that folder, whether it counts or not

The last @ before a step or a checkpoint's name is the border: a run may have an @ in its own name.
"""

import re
from dataclasses import dataclass

from orchestrator.errors import UsageError
from orchestrator.state.rundir import CheckpointName, classify_entry

_STEP = re.compile(r"\d{1,15}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAt:
    """A run, and the step or the entry of checkpoints/ that is meant; both None: no checkpoint was named."""

    run: str
    step: int | None = None
    entry: str | None = None

    @property
    def text(self) -> str:
        """As it is written."""
        if self.entry is not None:
            return f"{self.run}@{self.entry}"
        return self.run if self.step is None else f"{self.run}@{self.step}"


def parse_run_at(text: str) -> RunAt:
    """The run and checkpoint of RUN, RUN@STEP or RUN@NAME."""
    run, at, rest = text.rpartition("@")
    if not at or not run:
        return RunAt(run=text)
    if _STEP.fullmatch(rest):
        return RunAt(run=run, step=int(rest))
    is_entry = CheckpointName.parse(rest) is not None or classify_entry(rest)[1] is not None
    return RunAt(run=run, entry=rest) if is_entry else RunAt(run=text)


def need_checkpoint(text: str) -> RunAt:
    """As `parse_run_at`, where a checkpoint must be named. Raises UsageError."""
    found = parse_run_at(text)
    if found.step is None and found.entry is None:
        raise UsageError(
            f"{text[:120]!r} names no checkpoint. Write RUN@STEP, for example {text[:80]}@4000; `pawl ckpt ls "
            f"{text[:80]}` lists them."
        )
    return found
