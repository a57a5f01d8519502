"""The live memory of one bucket: weights, gradients, and the part of the optimizer state this dp rank holds.

    weights   [numel]   compute dtype; the model's parameters are views
    grads     [numel]   grad dtype;    every parameter's .grad is a view, autograd accumulates in place
    master    [held]    master dtype;  a view of `weights` where the dtypes agree
    exp_avg, exp_avg_sq [held]         Adam's moments

`held` is the whole bucket under ZeRO-0 and this dp rank's shard under ZeRO-1 (arXiv 1910.02054).
"""

from dataclasses import dataclass

import torch

from trainer.device import Precision
from trainer.optim.layout import Bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketStorage:
    """Tensors of one bucket; see the module's picture. `shard`: this dp rank's range of the bucket."""

    bucket: Bucket
    shard: slice
    held: slice
    weights: torch.Tensor
    grads: torch.Tensor
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


def allocate(
    bucket: Bucket, *, dp_rank: int, zero_stage: int, precision: Precision, device: torch.device
) -> BucketStorage:
    """Zeroed storage for `bucket` on this rank."""
    shard = slice(dp_rank * bucket.shard_numel, (dp_rank + 1) * bucket.shard_numel)
    held = shard if zero_stage == 1 else slice(0, bucket.numel)
    weights = torch.zeros(bucket.numel, dtype=precision.compute, device=device)
    part = weights[held]

    def zeros() -> torch.Tensor:
        return torch.zeros(part.shape, dtype=precision.master, device=device)

    return BucketStorage(
        bucket=bucket, shard=shard, held=held, weights=weights,
        grads=torch.zeros(bucket.numel, dtype=precision.grad, device=device),
        master=part if precision.is_own_master else zeros(), exp_avg=zeros(), exp_avg_sq=zeros(),
    )  # fmt: skip
