"""StepBatch: everything one data-parallel rank trains on in one optimizer step.

All micro-batches are known when the step starts. So valid labels can be counted before anything is computed, and each
pipeline stage reads labels and positions here instead of receiving them from its neighbours.

Letters: M micro-batches, B samples of a micro-batch, T tokens of a sample.
"""

from dataclasses import dataclass

import torch

IGNORE_LABEL = -100
"""A label that takes no part in the loss (PyTorch's own convention)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """One dp rank's share of a global batch; int64 on the CPU, equal on all its pp and tp ranks.

    input_ids_MBT, labels_MBT, position_ids_MBT: [M, B, T]; labels_MBT[…, t] is the token after input_ids_MBT[…, t].
    With document masks position_ids_MBT counts from 0 in each document; the first of a sample may have begun before it.
    sample_ids: global sample numbers in (M, B) order, for the record and for tests.
    """

    input_ids_MBT: torch.Tensor
    labels_MBT: torch.Tensor
    position_ids_MBT: torch.Tensor
    sample_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        shape = self.input_ids_MBT.shape
        assert len(shape) == 3 and self.labels_MBT.shape == shape == self.position_ids_MBT.shape
        assert len(self.sample_ids) == shape[0] * shape[1]

    @property
    def num_micro_batches(self) -> int:
        return self.input_ids_MBT.shape[0]

    @property
    def num_pairs(self) -> int:
        """(query, key) pairs that causal attention inside documents needs, over this dp rank's samples."""
        positions = self.position_ids_MBT
        return int(positions.detach().numpy().sum()) + positions.numel()

    @property
    def num_valid(self) -> int:
        """Labels of this dp rank that take part in the loss."""
        return int((self.labels_MBT != IGNORE_LABEL).sum())
