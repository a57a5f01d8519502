"""Causal self-attention with grouped kv heads; heads are cut over tp, so each rank attends with its own.

B batch · T sequence · D hidden · H local heads · K local kv heads · d head size.
"""

import torch
import torch.nn.functional as F
from torch import nn

from trainer.layers.factory import LayerFactory
from trainer.layers.rotary import Rotary, rotate


class CausalSelfAttention(nn.Module):
    """x [B, t, D] → [B, t, D]. Needs kv heads divisible by tp: a shared kv head would need its gradient summed."""

    def __init__(
        self, layers: LayerFactory, *, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int,
        rotary: Rotary, scale: float,
    ) -> None:  # fmt: skip
        super().__init__()
        if num_kv_heads % layers.tp.size:
            raise ValueError(f"num_key_value_heads = {num_kv_heads} is not divisible by tp = {layers.tp.size}")
        self.layers, self.head_dim, self.rotary, self.scale = layers, head_dim, rotary, scale
        self.is_grouped = num_heads != num_kv_heads
        self.q_proj = layers.column(hidden_size, num_heads * head_dim)
        self.k_proj = layers.column(hidden_size, num_kv_heads * head_dim)
        self.v_proj = layers.column(hidden_size, num_kv_heads * head_dim)
        self.o_proj = layers.row(num_heads * head_dim, hidden_size)

    def forward(self, x_BTD: torch.Tensor, position_ids_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.layers.share(x_BTD)
        cos, sin = self.rotary(position_ids_BT)
        q_BTHd = rotate(self._heads(self.q_proj(x_BTD)), cos, sin)
        k_BTKd = rotate(self._heads(self.k_proj(x_BTD)), cos, sin)
        v_BTKd = self._heads(self.v_proj(x_BTD))
        out_BHTd = F.scaled_dot_product_attention(
            q_BTHd.transpose(1, 2), k_BTKd.transpose(1, 2), v_BTKd.transpose(1, 2),
            is_causal=True, scale=self.scale, enable_gqa=self.is_grouped,
        )  # fmt: skip
        out: torch.Tensor = self.o_proj(out_BHTd.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim)
