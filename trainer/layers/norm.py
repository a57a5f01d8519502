"""RMSNorm (arXiv 1910.07467) and LayerNorm (arXiv 1607.06450) over the last dim; replicated over tp.

Their gradients are the same on all tp ranks, or with sequence parallelism each rank's part
(`ParamSpec.tp_partial_grad`). Means are taken in at least fp32.
"""

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    """x / √(mean x² + eps) · weight. x [..., D]."""

    def __init__(self, hidden_size: int, *, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=dtype, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LayerNorm(nn.Module):
    """(x − mean x) / √(var x + eps) · weight + bias. x [..., D]."""

    def __init__(self, hidden_size: int, *, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=dtype, device="meta"))
        self.bias = nn.Parameter(torch.empty(hidden_size, dtype=dtype, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
