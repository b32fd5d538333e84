"""SmoothAttention (QServe, section 4.2): channels of the keys are divided by what their queries are
multiplied with, so that no channel is much larger than the others.

    Z = (Q L) (K L^-1)^T        L = diag(l), l_i = l_j = max(max |K_i|, max |K_j|)^alpha

for the channels i and j that RoPE turns into each other: then L commutes with RoPE and is folded
into what makes queries and keys. Here l is rounded to a power of two, by which floating point
multiplies without any error.
"""

from __future__ import annotations

import torch
from torch import Tensor

PAIRINGS = ("half", "interleaved")
ALPHA = 0.5  # the paper's
_LEAST = 2.0**-24  # of a maximum: a channel that is always zero is left alone


def partners(head_dim: int, rotated: int, pairing: str) -> Tensor:
    """The channel that RoPE turns each channel into: int64 [head_dim].

    Args:
        rotated: channels that RoPE turns, the first ones; others are their own partners.
        pairing: `half` (i with i + rotated / 2) or `interleaved` (2 i with 2 i + 1).
    """
    channel = torch.arange(head_dim)
    half = (channel + rotated // 2) % max(rotated, 1)
    other = half if pairing == "half" else channel ^ 1
    return torch.where(channel < rotated, other, channel)


def smoothing_factors(largest: Tensor, partner: Tensor, alpha: float = ALPHA) -> Tensor:
    """l of each channel, a power of two: float32 [..., head_dim].

    Args:
        largest: max |K| of each channel over many tokens, [..., head_dim].
        partner: as `partners` gives it.
    """
    both = torch.maximum(largest, largest[..., partner]).float()
    return torch.where(both > _LEAST, torch.exp2((alpha * both.log2()).round()), 1.0)
