"""AdamW (arXiv 1711.05101) on flat shards: one fused kernel call per optimizer group, for all its buckets at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainer.optim.storage import BucketStorage


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """The constants of the update."""

    beta1: float
    beta2: float
    eps: float

    def step(
        self, storages: Sequence[BucketStorage], grads: Sequence[torch.Tensor], *, lr: float, weight_decay: float,
        adam_t: int,
    ) -> None:  # fmt: skip
        """Update the held master weights in place. `adam_t`: number of this update, from 1 (bias correction).

        Storages must all belong to one group. Decay is decoupled: w ← w·(1 − lr·wd) − lr·m̂/(√v̂ + eps).
        """
        if not storages:
            return
        count = torch.tensor(float(adam_t), dtype=torch.float32, device=grads[0].device)
        torch._fused_adamw_(
            [s.master for s in storages], list(grads), [s.exp_avg for s in storages], [s.exp_avg_sq for s in storages],
            [], [count] * len(storages),
            lr=lr, beta1=self.beta1, beta2=self.beta2, weight_decay=weight_decay, eps=self.eps,
            amsgrad=False, maximize=False,
        )  # fmt: skip
