"""Document masks: a token attends to the tokens before it in its own document, and to no other.

Positions count from 0 in each document, so they say all there is to say: the token at place t of a row, at position p
of its document, sees the places t − p … t. New positions alone would not do: the tokens before would still be seen.

B batch · T sequence.
"""

import torch
from torch import nn


class DocumentMask(nn.Module):
    """position_ids [B, T] → [B, 1, T, T] in the compute dtype, to be added to attention's scores: 0 or −∞.

    Made once a micro-batch and stage, and shared by all layers there.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        places_T = torch.arange(position_ids.shape[-1], device=position_ids.device)
        first_BT1 = (places_T - position_ids).unsqueeze(-1)
        seen_BTT = (places_T >= first_BT1) & (places_T <= places_T.unsqueeze(-1))
        zero = torch.zeros((), dtype=self.dtype, device=position_ids.device)
        return torch.where(seen_BTT, zero, float("-inf")).unsqueeze(1)
