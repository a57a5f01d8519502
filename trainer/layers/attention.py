"""Causal self-attention with grouped kv heads; heads are cut over tp, so each rank attends with its own.

B batch · T sequence · D hidden · H local heads · K local kv heads · d head size.
"""

import torch
import torch.nn.functional as F
from torch import nn

from trainer.layers.factory import LayerFactory
from trainer.layers.rotary import Rotary, rotate


class CausalSelfAttention(nn.Module):
    """x [B, t, D] → [B, t, D]. Needs kv heads divisible by tp: a shared kv head would need its gradient summed.

    `rotary`: None in a layer without rotary positions.
    `qk_norm_eps`: each head of q and k goes through an RMSNorm over d before it is rotated; one weight [d] for all
    heads, so that each tp rank's gradient of it, from its own heads, is a part (`ParamSpec.tp_partial_grad`).
    """

    def __init__(
        self, layers: LayerFactory, *, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int,
        rotary: Rotary | None, scale: float, qkv_bias: bool = False, out_bias: bool = False,
        qk_norm_eps: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if num_kv_heads % layers.tp.size:
            raise ValueError(f"num_key_value_heads = {num_kv_heads} is not divisible by tp = {layers.tp.size}")
        self.layers, self.head_dim, self.rotary, self.scale = layers, head_dim, rotary, scale
        self.is_grouped = num_heads != num_kv_heads
        self.q_proj = layers.column(hidden_size, num_heads * head_dim, bias=qkv_bias)
        self.k_proj = layers.column(hidden_size, num_kv_heads * head_dim, bias=qkv_bias)
        self.v_proj = layers.column(hidden_size, num_kv_heads * head_dim, bias=qkv_bias)
        self.o_proj = layers.row(num_heads * head_dim, hidden_size, bias=out_bias)
        self.q_norm = None if qk_norm_eps is None else layers.norm(head_dim, eps=qk_norm_eps)
        self.k_norm = None if qk_norm_eps is None else layers.norm(head_dim, eps=qk_norm_eps)

    def forward(
        self, x_BTD: torch.Tensor, position_ids_BT: torch.Tensor, mask_B1TT: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`mask_B1TT`: added to the scores, and says all about who sees whom; None: every token sees those before."""
        x_BTD = self.layers.share(x_BTD)
        q_BTHd, k_BTKd = self._heads(self.q_proj(x_BTD)), self._heads(self.k_proj(x_BTD))
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHd, k_BTKd = self.q_norm(q_BTHd), self.k_norm(k_BTKd)
        if self.rotary is not None:
            cos, sin = self.rotary(position_ids_BT)
            q_BTHd, k_BTKd = rotate(q_BTHd, cos, sin), rotate(k_BTKd, cos, sin)
        v_BTKd = self._heads(self.v_proj(x_BTD))
        out_BHTd = F.scaled_dot_product_attention(
            q_BTHd.transpose(1, 2), k_BTKd.transpose(1, 2), v_BTKd.transpose(1, 2),
            attn_mask=mask_B1TT, is_causal=mask_B1TT is None, scale=self.scale, enable_gqa=self.is_grouped,
        )  # fmt: skip
        out: torch.Tensor = self.o_proj(out_BHTd.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim)
