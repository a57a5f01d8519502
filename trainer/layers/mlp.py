"""SwiGLU feed-forward (arXiv 2002.05202): down(silu(gate x) · up x), the inner dim cut over tp."""

import torch
import torch.nn.functional as F
from torch import nn

from trainer.layers.factory import LayerFactory


class SwiGLU(nn.Module):
    """x [B, t, D] → [B, t, D]. Comm: 1 all-reduce (tp), or 1 all-gather and 1 reduce-scatter."""

    def __init__(self, layers: LayerFactory, *, hidden_size: int, intermediate_size: int, bias: bool) -> None:
        super().__init__()
        self.layers = layers
        self.gate_proj = layers.column(hidden_size, intermediate_size, bias=bias)
        self.up_proj = layers.column(hidden_size, intermediate_size, bias=bias)
        self.down_proj = layers.row(intermediate_size, hidden_size, bias=bias)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = self.layers.share(x_BTD)
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
        return out
