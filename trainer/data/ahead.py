"""One batch ahead: the batch of step s + 1 is read while step s is due, so that its labels can be counted along with s.

What is held is never more than one batch, and nothing depends on it: a batch that was not held is read when it is
needed, and a number that is not known is counted then. So a resume, a skip window or a drain needs no care.
"""

from dataclasses import dataclass
from typing import Protocol

from trainer.data.batch import StepBatch


class BatchSource(Protocol):
    """What gives the batch of a step."""

    def batch(self, step_index0: int, consumed_samples: int) -> StepBatch: ...


@dataclass(slots=True, kw_only=True)
class _Held:
    place: tuple[int, int]
    read: StepBatch | Exception
    num_valid: int | None = None


class ReadAhead:
    """The batches of a loader, at most one of them read before its step."""

    def __init__(self, source: BatchSource) -> None:
        self._source = source
        self._held: _Held | None = None

    def take(self, step_index0: int, consumed_samples: int) -> tuple[StepBatch, int | None]:
        """The batch of step `step_index0` + 1 and the valid labels of its global batch, None if not counted yet.

        Raises what reading it raised, also when it was read ahead: the error is that of this step, not of the one
        before, which has been trained and may have been saved.
        """
        held, self._held = self._held, None
        if held is None or held.place != (step_index0, consumed_samples):
            return self._source.batch(step_index0, consumed_samples), None
        if isinstance(held.read, Exception):
            raise held.read
        return held.read, held.num_valid

    def look(self, step_index0: int, consumed_samples: int) -> int:
        """Read the batch of a coming step and keep it; returns this dp rank's valid labels in it."""
        try:
            read: StepBatch | Exception = self._source.batch(step_index0, consumed_samples)
        except Exception as error:  # raised by `take` when its step comes
            read = error
        self._held = _Held(place=(step_index0, consumed_samples), read=read)
        return 0 if isinstance(read, Exception) else read.num_valid

    def note(self, num_valid: int) -> None:
        """Remember the valid labels of the global batch that is held, if one is."""
        if self._held is not None:
            self._held.num_valid = num_valid
