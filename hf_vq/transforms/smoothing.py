"""SmoothAttention (QServe, section 4.2): divide channels of the keys, and multiply those of the
queries, by the same factors, so that no channel is much larger than the others.

    Z = (Q L) (K L^-1)^T        L = diag(l), l_i = l_j = max(max |K_i|, max |K_j|)^alpha

for the two channels i and j of a RoPE pair: then L commutes with RoPE and is folded into the
weights that make queries and keys. Here l is rounded to a power of two, so the multiplication is
exact in floating point.

Block-output smoothing (QServe, section 4.3.2) divides the inputs x of the layers that end a block:

    W x = (W diag(s)) (x / s)       s_j = max |x_j|^a / max |W_j|^b
"""

from __future__ import annotations

import torch
from torch import Tensor

PAIRINGS = ("half", "interleaved")
ALPHA = 0.5  # the paper's
_LEAST = 2.0**-24  # smallest maximum of a channel that is scaled: others are zero


def partners(head_dim: int, rotated: int, pairing: str) -> Tensor:
    """Index of each channel's partner under RoPE: int64 [head_dim].

    Args:
        rotated: number of channels that RoPE rotates, the first ones; others are their own partner.
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
        partner: result of `partners`.
    """
    both = torch.maximum(largest, largest[..., partner]).float()
    return torch.where(both > _LEAST, torch.exp2((alpha * both.log2()).round()), 1.0)


def output_factors(largest: Tensor, weights: Tensor, a: float, b: float) -> Tensor:
    """s of each channel [n], float64; their geometric mean is 1, so weights stay in fp16's range.

    Args:
        largest: max |x| of each channel over many tokens.
        weights: max |W| of each column.
        a, b: 0.3 and 0.7 for groups of 128, 0.1 and 0.9 for whole rows (DeepCompressor's QoQ).
    """
    x, w = largest.double(), weights.double()
    alive = (x > _LEAST) & (w > _LEAST)  # others get the factor 1
    logs = torch.where(alive, a * x.clamp_min(_LEAST).log() - b * w.clamp_min(_LEAST).log(), 0.0)
    mean = logs.sum() / alive.sum().clamp_min(1)
    return torch.where(alive, (logs - mean).exp(), 1.0)
