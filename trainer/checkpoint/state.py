"""RunState: all a run must remember beside its weights and moments.

Learning rate and weight decay are functions of `step`, the data order is a function of `consumed_samples`, and
initialisation is a function of the seed. So neither a scheduler, a loader nor a random generator has state to save.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """State after `step` completed optimizer updates.

    consumed_samples, consumed_tokens: drawn from the data so far, skipped windows included.
    adam_t: updates that really moved the weights (bias correction); less than `step` when steps were skipped.
    skip_windows: (first_step, last_step) pairs whose batches are drawn and not trained on.
    """

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    adam_t: int = 0
    skip_windows: tuple[tuple[int, int], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "skip_windows": [list(window) for window in self.skip_windows]}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "RunState":
        """Read the `state` object of a manifest. KeyError, ValueError: a field is missing or no number."""
        windows = tuple((int(first), int(last)) for first, last in record["skip_windows"])
        return cls(
            step=int(record["step"]),
            consumed_samples=int(record["consumed_samples"]),
            consumed_tokens=int(record["consumed_tokens"]),
            adam_t=int(record["adam_t"]),
            skip_windows=windows,
        )
