"""Factors of keys before they are coded, by which queries are divided: <q, k> = <q / s, s k>.

A code of a rotated key is equally wrong in all channels, by a part of the key's norm. So the
squared error of a logit is, over many queries and keys, in proportion to

    sum_c q_c^2 / s_c^2  *  sum_c s_c^2 k_c^2

which is least for s_c^2 = rms(q_c) / rms(k_c): then it is (sum_c rms(q_c) rms(k_c))^2. It falls
most where keys are large in channels in which queries are small. k is what is left of a key beyond
its means. SmoothAttention (`smoothing`) looks at the largest keys alone, since codes that are not
rotated are wrong where keys are large.
"""

from __future__ import annotations

import torch
from torch import Tensor

FEWEST = 16
"""Queries that tell what is large; with fewer, factors are 1."""
WORTH = 1.1
"""Heads are smoothed if that divides the squared error of their logits by so much."""
MOST = 16.0
"""Factors lie within 1 / MOST and MOST."""
_LEAST = (
    1e-4  # of a pair's squares, beyond its means, and of the mean pair: differences are rounded
)


def squares(x: Tensor, heads: int) -> Tensor:
    """Mean squares of each channel of rows [B, Hq, n, D], over tokens and the Hq / `heads` heads
    that share one: float32 [B, heads, 1, D]."""
    grouped = x.unflatten(1, (heads, -1))
    norms = torch.linalg.vector_norm(grouped, dim=(2, 3), dtype=torch.float32)
    return norms[:, :, None].square() / max(grouped.shape[2] * grouped.shape[3], 1)


def key_smoothing(queries: Tensor, keys: Tensor, means: Tensor, partner: Tensor) -> Tensor:
    """s of each channel; their geometric mean is about 1: float32 [B, H, 1, D].

    Args:
        queries: `squares` of the queries, [B, H, 1, D].
        keys: `squares` of the keys.
        means: what of `keys` is their means', which are not coded.
        partner: of each channel under rotary embeddings, int64 [D] (`smoothing.partners`): tokens
            that come later turn one into the other, so that they share their s.
    """
    of_pairs = torch.stack([queries, keys, means])
    queries, keys, means = of_pairs + of_pairs[..., partner]
    both = torch.stack([queries, torch.maximum(keys - means, _LEAST * keys)])
    both = (both / both.mean(-1, keepdim=True)).clamp_min(_LEAST)
    logs = both.log()
    factor = (logs[0] - logs[1]) / 4
    factor = (factor - factor.mean(-1, keepdim=True)).exp().clamp(1 / MOST, MOST)
    before = both.sum(-1, keepdim=True).prod(0)
    after = both.prod(0).sqrt().sum(-1, keepdim=True).square()
    return torch.where(before >= WORTH * after, factor, 1.0)  # NaN is not


def in_range(factors: Tensor) -> bool:
    """True if these may be factors of keys."""
    return bool(((factors >= 1 / MOST) & (factors <= MOST)).all())
