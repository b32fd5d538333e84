"""A mean of keys that turns with the position, as rotary position embeddings (RoPE) turn the keys.

A key is k_n = R_n (W x + b). Its constant part m = b + mean(W x) turns with the position n, so that
in fast pairs of channels the mean over positions is nearly 0, and a code would have to hold all of
R_n m. What is coded is r_n = k_n - mean - R_n m, and q . R_n m is a part of every logit of a coded
token:

    q . R_n m = sum_p  A_p cos(n f_p) + B_p sin(n f_p)      A_p = q_a m_a + q_b m_b
                                                            B_p = q_b m_a - q_a m_b

for the pairs p = (a, b) of channels and their frequencies f_p. In a block of tokens that begins at
position s, A and B turn once by s f_p, and cos(j f_p), sin(j f_p) of j = 0, 1, .. are one small
table for all blocks, heads and layers.

Angles n f_p are products in float64: they reach 10^5 radians, and the largest means 10^2 times what
changes from token to token, so that float32 would leave errors of a logit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kv import KVCacheView
from .reference.codes import mean_of

SMALLEST_SHARE = 0.02
"""Of what is left to the codes of a head: pairs that hold less together do not turn."""


def rotated(mean: Tensor, inv_freq: Tensor, interleaved: bool, positions: Tensor) -> Tensor:
    """R_n `mean` at each position n.

    Args:
        mean: float32 [B, H, 1 or n, D].
        inv_freq: [r], radians per token of each pair; 2 r <= D, other channels stay as they are.
        interleaved: pairs are channels (2 p, 2 p + 1), else (p, p + r).
        positions: int64 [n], or [B, n] for rows that begin at different places; negative ones turn
            back.

    Returns:
        float32 [B, H, n, D].
    """
    angles = positions.double()[..., None] * inv_freq.double()  # [.., n, r]
    angles = angles[:, None] if positions.ndim == 2 else angles
    cos, sin = angles.cos().float(), angles.sin().float()
    count = 2 * len(inv_freq)
    turning, rest = mean[..., :count], mean[..., count:]
    if interleaved:
        a, b = turning[..., ::2], turning[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = turning.chunk(2, -1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.cat([turned, rest.expand(*turned.shape[:-1], -1)], -1)


def rotated_key_mean(view: KVCacheView, positions: Tensor) -> Tensor:
    """R_n m of positions [n] or [B, n] of a view that has a rotary mean: float32 [B, H, n, D]."""
    mean, inv_freq = view.key_rotary_mean, view.rotary_inv_freq
    assert mean is not None and inv_freq is not None
    return rotated(mean, inv_freq, view.rotary_interleaved, positions + view.rotary_start)


def measure_means(
    keys: Tensor, positions: Tensor, inv_freq: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Decide, pair by pair, which mean leaves less to the codes: a standing or a turning one.

    A mean over tokens takes its squared norm off their mean squared norm, so the larger one is
    better. If they are as good, the turning one is taken: keys of a model with RoPE go on turning
    after the tokens that were measured. Pairs that matter little keep the standing one, so that a
    head that gains nothing has a rotary mean of zeros.

    Args:
        keys: [B, H, n, D], the tokens to measure.
        positions: int64 [n] or [B, n] of these tokens.
        inv_freq: as of `rotated`.
        interleaved: as of `rotated`.

    Returns:
        The mean and the rotary mean, float32 [B, H, 1, D] each.
    """
    standing = mean_of(keys)
    turning = mean_of(rotated(keys.float(), inv_freq, interleaved, -positions))
    count = 2 * len(inv_freq)
    turning[..., count:] = 0
    stood, turned = (_pair_energy(mean, count, interleaved) for mean in (standing, turning))
    energy = mean_of(keys.float().square()).sum(-1, keepdim=True)
    best = torch.maximum(stood, turned).sum(-1, keepdim=True)
    best = best + standing[..., count:].square().sum(-1, keepdim=True)
    least = (energy - best).clamp_min(0) * (SMALLEST_SHARE / max(len(inv_freq), 1))
    turns = (turned > least) & (turned >= stood - least)
    turns = torch.nn.functional.pad(_by_channel(turns, interleaved), (0, keys.shape[-1] - count))
    return standing.masked_fill(turns, 0), turning.masked_fill(~turns, 0)


def _pair_energy(mean: Tensor, count: int, interleaved: bool) -> Tensor:
    squares = mean[..., :count].square()
    shape = (-1, 2) if interleaved else (2, -1)
    return squares.unflatten(-1, shape).sum(-1 if interleaved else -2)


def _by_channel(pairs: Tensor, interleaved: bool) -> Tensor:
    return pairs.repeat_interleave(2, -1) if interleaved else torch.cat([pairs, pairs], -1)
