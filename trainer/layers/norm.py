"""RMSNorm (arXiv 1910.07467) over the last dim; replicated over tp.

Its gradient is the same on all tp ranks, or with sequence parallelism each rank's part (`ParamSpec.tp_partial_grad`).
"""

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    """x / √(mean x² + eps) · weight. x [..., D]. Takes the mean in at least fp32."""

    def __init__(self, hidden_size: int, *, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=dtype, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
