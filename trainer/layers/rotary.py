"""Rotary position embedding, Hugging Face's half-split form: pairs are (i, i + d/2), not (2i, 2i + 1).

B batch · T sequence · H heads · d head size.
"""

from typing import Any

import torch

from trainer.device import statistics_dtype


class Rotary:
    """Tables of cos and sin for positions below `max_positions`, made on first use and shared by all layers.

    Angles are taken in at least fp32 and the tables cast to the compute dtype, as Hugging Face does.
    """

    def __init__(self, *, head_dim: int, theta: float, max_positions: int, dtype: torch.dtype) -> None:
        self.head_dim, self.theta, self.max_positions, self.dtype = head_dim, theta, max_positions, dtype
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, position_ids_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin [B, T, 1, d/2] at these positions. IndexError past `max_positions`."""
        if position_ids_BT.is_meta:
            shape = (*position_ids_BT.shape, 1, self.head_dim // 2)
            return (torch.empty(shape, dtype=self.dtype, device="meta"),) * 2
        if self._tables is None or self._tables[0].device != position_ids_BT.device:
            self._tables = self._make(position_ids_BT.device)
        cos, sin = self._tables
        return cos[position_ids_BT].unsqueeze(2), sin[position_ids_BT].unsqueeze(2)

    def _make(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = statistics_dtype(self.dtype)
        exponents = torch.arange(0, self.head_dim, 2, device=device).to(dtype) / self.head_dim
        angles = torch.arange(self.max_positions, device=device, dtype=dtype)[:, None] / self.theta**exponents
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)


class _Rotate(torch.autograd.Function):
    """A rotation's transpose is the rotation by the negative angle, so backward needs no saved activations."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, sin, -1.0), None, None


def rotate(x_BTHd: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each head's pairs (i, i + d/2) by the position's angle i."""
    out: torch.Tensor = _Rotate.apply(x_BTHd, cos, sin)  # type: ignore[no-untyped-call]
    return out


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out_first, out_second = out.chunk(2, dim=-1)
    out_first.copy_(first).mul_(cos).addcmul_(second, sin, value=-sign)
    out_second.copy_(second).mul_(cos).addcmul_(first, sin, value=sign)
    return out
