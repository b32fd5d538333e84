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

from typing import NamedTuple

import torch
from torch import Tensor

from .kv import KVCacheView
from .reference.codes import mean_of

SMALLEST_SHARE = 0.02
"""Of what is left to the codes of a head: pairs that hold less together do not turn."""
TIE = 0.7
"""A turning mean with so much of the energy of a standing one is taken: it stays right."""
DIFFERENT = 0.9
"""Pairs are (2 p, 2 p + 1) if that leaves less than so much of what is left by (p, p + r)."""
_FEWEST = 16  # tokens that tell one layout of pairs from the other
_AT_ONCE = 4096  # tokens: what is rotated is a copy


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
    return turned_by(mean, *cos_sin(inv_freq, positions), interleaved)


def cos_sin(inv_freq: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles at `positions` [n] or [B, n]: float32 [n, r] or [B, 1, n, r]
    each."""
    angles = positions.double()[..., None] * inv_freq.double()
    angles = angles[:, None] if positions.ndim == 2 else angles
    return angles.cos().float(), angles.sin().float()


def turned_by(mean: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """`rotated` by angles whose cosines and sines are given."""
    count = 2 * cos.shape[-1]
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
    """Decide, pair by pair, which mean is taken off the keys: a standing or a turning one.

    A mean over tokens takes its squared norm off their mean squared norm, so the larger one is
    better for these tokens. For those that follow, the turning one is better wherever keys do turn,
    which slow pairs cannot tell, and few tokens only roughly. So

    - a head turns if its pairs that turn by a radian or more say so together, within a tie;
    - then each pair turns, unless its standing mean is clearly larger;
    - but pairs that hold next to nothing stand: a head without a constant part costs nothing.

    Args:
        keys: [B, H, n, D], the tokens to measure.
        positions: int64 [n] or [B, n] of these tokens, one after another.
        inv_freq: as of `rotated`.
        interleaved: as of `rotated`.

    Returns:
        The mean and the rotary mean, float32 [B, H, 1, D] each.
    """
    found = _Moments.of(keys, positions, inv_freq, interleaved)
    stood, turned, pairs = found.stood, found.turned, max(len(inv_freq), 1)
    share = SMALLEST_SHARE * found.left
    tell = (inv_freq * keys.shape[2] >= 1).to(stood.dtype)
    head = _as_good(*((each * tell).sum(-1, keepdim=True) for each in (turned, stood)), share)
    turns = head & (turned > share / pairs) & _as_good(turned, stood, share / pairs)
    rest = keys.shape[-1] - 2 * len(inv_freq)
    turns = torch.nn.functional.pad(_by_channel(turns, interleaved), (0, rest))
    return found.standing.masked_fill(turns, 0), found.turning.masked_fill(~turns, 0)


def pairs_interleave(keys: Tensor, positions: Tensor, inv_freq: Tensor) -> bool:
    """Whether the keys of a layer turn in pairs (2 p, 2 p + 1), rather than (p, p + r): models have
    either, and their configs do not say which. Arguments as of `measure_means`."""
    if keys.shape[2] < _FEWEST:
        return False
    halves, neighbours = (
        _Moments.of(keys, positions, inv_freq, layout).left.sum() for layout in (False, True)
    )
    return bool(neighbours < DIFFERENT * halves)


class _Moments(NamedTuple):
    """Of keys [B, H, n, D]: means float32 [B, H, 1, D], their energy in pairs [B, H, 1, r], and the
    energy [B, H, 1, 1] that the better ones leave to the codes."""

    standing: Tensor
    turning: Tensor
    stood: Tensor
    turned: Tensor
    left: Tensor

    @classmethod
    def of(cls, keys: Tensor, positions: Tensor, inv_freq: Tensor, interleaved: bool) -> _Moments:
        standing = turning = energy = torch.zeros((), device=keys.device)
        for begin in range(0, keys.shape[2], _AT_ONCE):
            some = keys[:, :, begin : begin + _AT_ONCE].float()
            at, share = positions[..., begin : begin + _AT_ONCE], some.shape[2] / keys.shape[2]
            standing = standing + share * mean_of(some)
            turning = turning + share * mean_of(rotated(some, inv_freq, interleaved, -at))
            energy = energy + share * mean_of(some.square()).sum(-1, keepdim=True)
        count = 2 * len(inv_freq)
        turning[..., count:] = 0
        stood, turned = (_pair_energy(mean, count, interleaved) for mean in (standing, turning))
        best = torch.maximum(stood, turned).sum(-1, keepdim=True)
        best = best + standing[..., count:].square().sum(-1, keepdim=True)
        return cls(standing, turning, stood, turned, (energy - best).clamp_min(0))


def _as_good(turned: Tensor, stood: Tensor, slack: Tensor) -> Tensor:
    return turned >= TIE * stood - slack


def _pair_energy(mean: Tensor, count: int, interleaved: bool) -> Tensor:
    squares = mean[..., :count].square()
    shape = (-1, 2) if interleaved else (2, -1)
    return squares.unflatten(-1, shape).sum(-1 if interleaved else -2)


def _by_channel(pairs: Tensor, interleaved: bool) -> Tensor:
    return pairs.repeat_interleave(2, -1) if interleaved else torch.cat([pairs, pairs], -1)
