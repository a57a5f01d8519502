"""Feed-forward layers, the inner dim cut over tp.

Gated: down(act(gate x) · up x) (arXiv 2002.05202); plain: c_proj(act(c_fc x)).
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import nn

from trainer.layers.factory import LayerFactory

Activation = Callable[[torch.Tensor], torch.Tensor]


def relu2(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)² (arXiv 2109.08668)."""
    return F.relu(x).square()


ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {"silu": F.silu, "gelu": F.gelu, "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"), "relu2": relu2}
)
"""By transformers' word (`ModelConfig.activation`)."""


class GatedMLP(nn.Module):
    """x [B, t, D] → [B, t, D]. Comm: 1 all-reduce (tp), or 1 all-gather and 1 reduce-scatter."""

    def __init__(
        self, layers: LayerFactory, *, hidden_size: int, intermediate_size: int, activation: str, bias: bool
    ) -> None:
        super().__init__()
        self.layers, self.act = layers, ACTIVATIONS[activation]
        self.gate_proj = layers.column(hidden_size, intermediate_size, bias=bias)
        self.up_proj = layers.column(hidden_size, intermediate_size, bias=bias)
        self.down_proj = layers.row(intermediate_size, hidden_size, bias=bias)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = self.layers.share(x_BTD)
        out: torch.Tensor = self.down_proj(self.act(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
        return out


class PlainMLP(nn.Module):
    """Two matrices, as GPT-2 and StarCoder2 have them. Shapes and communication as `GatedMLP`."""

    def __init__(
        self, layers: LayerFactory, *, hidden_size: int, intermediate_size: int, activation: str, bias: bool
    ) -> None:
        super().__init__()
        self.layers, self.act = layers, ACTIVATIONS[activation]
        self.c_fc = layers.column(hidden_size, intermediate_size, bias=bias)
        self.c_proj = layers.row(intermediate_size, hidden_size, bias=bias)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.c_proj(self.act(self.c_fc(self.layers.share(x_BTD))))
        return out
