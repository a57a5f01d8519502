"""Rotary position embedding, Hugging Face's half-split form: pairs are (i, i + d/2), not (2i, 2i + 1).

Pair i turns by position · θ^(−2i/d). A model that is to read longer texts than it was trained on turns slower, by the
`rope_type` of its config (`factor` f, original length L, turns in it w = L · frequency / 2π):

    linear   all pairs by 1/f
    llama3   pairs with w < low_freq_factor by 1/f, with w > high_freq_factor not, between them in proportion to w
    yarn     pairs with w < beta_slow by 1/f, with w > beta_fast not, between them in proportion to i; cosines and sines
             are multiplied, so that attention stays as sharp (arXiv 2309.00071)

B batch · T sequence · H heads · d head size.
"""

import math
from typing import Any

import torch

from trainer.config.rope import RopeParameters
from trainer.device import statistics_dtype


class Rotary:
    """Tables of cos and sin for positions below `max_positions`, made on first use and shared by all layers.

    `rope`: with rope_theta and all that its type needs. Angles are taken in at least fp32, by Hugging Face's own steps
    (at position 10,000 one rounding more moves an angle by 1e-3), and the tables cast to the compute dtype.
    """

    def __init__(self, *, head_dim: int, rope: RopeParameters, max_positions: int, dtype: torch.dtype) -> None:
        self.head_dim, self.rope, self.max_positions, self.dtype = head_dim, rope, max_positions, dtype
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
        speeds = frequencies(self.rope, self.head_dim, dtype=dtype, device=device)
        angles = torch.arange(self.max_positions, device=device, dtype=dtype)[:, None] * speeds
        factor = attention_factor(self.rope)
        return (angles.cos() * factor).to(self.dtype), (angles.sin() * factor).to(self.dtype)


def frequencies(rope: RopeParameters, head_dim: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Radians per position of each pair [d/2]."""
    assert rope.rope_theta is not None
    periods = rope.rope_theta ** (torch.arange(0, head_dim, 2, device=device).to(dtype) / head_dim)
    plain = 1.0 / periods
    match rope.rope_type:
        case "linear":
            return plain / _given(rope.factor)
        case "llama3":
            return _llama3(rope, plain)
        case "yarn":
            kept = _yarn_share(rope, head_dim, plain)
            return 1.0 / (_given(rope.factor) * periods) * (1 - kept) + plain * kept
    return plain


def attention_factor(rope: RopeParameters) -> float:
    """What cosines and sines are multiplied by: 1 but for yarn, where scores grow by its square."""
    if rope.rope_type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    factor = _given(rope.factor)
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(factor, rope.mscale) / _mscale(factor, rope.mscale_all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(rope: RopeParameters, plain: torch.Tensor) -> torch.Tensor:
    low, high, factor = (_given(x) for x in (rope.low_freq_factor, rope.high_freq_factor, rope.factor))
    turns = _given(rope.original_max_position_embeddings) / (2 * math.pi / plain)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - share) * plain / factor + share * plain


def _yarn_share(rope: RopeParameters, head_dim: int, plain: torch.Tensor) -> torch.Tensor:
    """Of each pair, how much of its frequency is kept: 1 for the fast ones, 0 for the slow ones, a ramp between."""
    theta, length = _given(rope.rope_theta), _given(rope.original_max_position_embeddings)

    def pair_with(turns: float) -> float:
        """The pair, not a whole number, that turns so often in the original length."""
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_with(rope.beta_fast or 32.0), pair_with(rope.beta_slow or 1.0)
    if rope.truncate is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    last += 0.001 * (first == last)
    pairs = torch.arange(len(plain), device=plain.device, dtype=plain.dtype)
    return 1 - ((pairs - first) / (last - first)).clamp(0, 1)


def _given(value: float | None) -> float:
    """A value that the rules of the config demand."""
    assert value is not None
    return value


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
