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

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .kv import KVCacheView
from .reference.codes import mean_of

SMALLEST_SHARE = 0.02
"""Of what is left to the codes of a head: pairs that hold less together do not turn."""
NOISE = 3.0
"""The mean of n tokens holds by chance 1 / (n - 1) of what it leaves: heads, and pairs, below so
much of it stand."""
TIE = 0.7
"""A turning mean with so much of the energy of a standing one is taken: it stays right."""
LITTLE = 3.0
"""Pairs that would need one more product of tensor cores stand while they give the codes of their
head at most so many times what is left to these otherwise."""
FAR = 1 << 17
"""Tokens from the measured ones, up to which that holds."""
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


class KeyMoments:
    """What decides the means of keys: moments of tokens, which may come in parts.

    Args:
        inv_freq: as of `rotated`.
        interleaved: as of `rotated`.
    """

    def __init__(self, inv_freq: Tensor, interleaved: bool) -> None:
        self.inv_freq, self.interleaved = inv_freq, interleaved
        self.tokens = self.span = 0  # of all, and of the longest sequence
        zero = torch.zeros((), device=inv_freq.device)
        self._standing = self._turning = self.squares = zero
        """`squares`: mean squares of each channel, float32 [B, H, 1, D]."""

    def add(self, keys: Tensor, positions: Tensor) -> KeyMoments:
        """Count keys [B, H, n, D] at `positions` int64 [n] or [B, n], one after another, too."""
        count = keys.shape[2]
        for begin in range(0, count, _AT_ONCE):
            some, at = keys[:, :, begin : begin + _AT_ONCE].float(), positions[..., begin:]
            at, number = at[..., :_AT_ONCE], some.shape[2]
            turned_back = rotated(some, self.inv_freq, self.interleaved, -at)
            self.tokens += number
            share = number / self.tokens  # 1 of the first: their mean is not rounded again
            self._standing = torch.lerp(self._standing, mean_of(some), share)
            self._turning = torch.lerp(self._turning, mean_of(turned_back), share)
            self.squares = torch.lerp(self.squares, mean_of(some.square()), share)
        self.span = max(self.span, count)
        return self

    @property
    def _means(self) -> tuple[Tensor, Tensor]:
        turning = self._turning.clone()
        turning[..., 2 * len(self.inv_freq) :] = 0
        return self._standing, turning

    def _energies(self, standing: Tensor, turning: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the means in pairs [B, H, 1, r], and what the better ones leave [B, H, 1, 1]."""
        count = 2 * len(self.inv_freq)
        stood, turned = (_pair_energy(x, count, self.interleaved) for x in (standing, turning))
        best = torch.maximum(stood, turned).sum(-1, keepdim=True)
        best = best + standing[..., count:].square().sum(-1, keepdim=True)
        return stood, turned, (self.squares.sum(-1, keepdim=True) - best).clamp_min(0)

    def _given_by_standing(self) -> Tensor:
        """What a pair that stands gives the codes, at most, up to FAR tokens on, in units of |m|^2:
        |R_n m|^2, or of a pair too slow to be told, |R_n m - m|^2 [r]."""
        angle = (self.inv_freq * FAR).clamp_max(math.pi)
        return torch.where(self.inv_freq * self.span >= 1, 1.0, 2 - 2 * angle.cos())

    @property
    def left(self) -> Tensor:
        """Mean squared norm of what is left to the codes [B, H, 1, 1]."""
        return self._energies(*self._means)[2]

    def means(self, strength: float = 0.0, together: int = 1) -> tuple[Tensor, Tensor]:
        """Decide, pair by pair, which mean is taken off the keys: a standing or a turning one.

        A mean over tokens takes its squared norm off their mean squared norm, so the larger one is
        better for these tokens. For those that follow, the turning one is better wherever keys do
        turn, which slow pairs cannot tell, and few tokens only roughly. So

        - a head turns if its mean is more than chance, and if its pairs that turn by a radian or
          more say so together, within a tie;
        - then each pair turns, unless its standing mean is clearly larger;
        - but pairs that hold next to nothing stand: a head without a constant part costs nothing.
          If pairs turn `together`, the weakest of a head stand where that saves a product and
          gives the codes little (LITTLE).

        Args:
            strength: all heads of a row stand unless one's turning mean has so many times the
                energy that is left to its codes.
            together: pairs that one product of tensor cores takes.

        Returns:
            The mean and the rotary mean, float32 [B, H, 1, D] each.
        """
        standing, turning = self._means
        stood, turned, left = self._energies(standing, turning)
        share, pairs = SMALLEST_SHARE * left, max(len(self.inv_freq), 1)
        tell = self.inv_freq * self.span >= 1
        telling, standing_still = (
            torch.where(tell, x, 0).sum(-1, keepdim=True) for x in (turned, stood)
        )
        least = torch.maximum(share, left * (NOISE / max(self.tokens - 1, 1)))
        head = (turned.sum(-1, keepdim=True) > least) & _as_good(telling, standing_still, share)
        head = head & (self.tokens > 1)
        holds = turned > least / pairs
        turns = head & holds & _as_good(turned, stood, share / pairs)
        held = torch.where(turns, turned, 0).sum(-1, keepdim=True)
        turns = turns & (held >= strength * left).any(1, keepdim=True)
        if together > 1:
            given = torch.where(turns, turned, 0) * self._given_by_standing()
            turns = turns & _strongest(given, LITTLE * left, together)
        rest = standing.shape[-1] - 2 * len(self.inv_freq)
        turns = torch.nn.functional.pad(_by_channel(turns, self.interleaved), (0, rest))
        return standing.masked_fill(turns, 0), turning.masked_fill(~turns, 0)


def measure_means(
    keys: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    interleaved: bool,
    strength: float = 0.0,
    together: int = 1,
) -> tuple[Tensor, Tensor]:
    """`KeyMoments.means` of keys [B, H, n, D] at `positions` int64 [n] or [B, n].

    The mean of a head that does not turn is `mean_of` its keys, to the last bit.
    """
    moments = moments_of(keys, positions, inv_freq, interleaved)
    return means_of(moments, keys, strength, together)


def means_of(
    moments: KeyMoments, keys: Tensor, strength: float = 0.0, together: int = 1
) -> tuple[Tensor, Tensor]:
    """`measure_means` of the keys [B, H, n, D] whose moments these are."""
    standing, turning = moments.means(strength, together)
    if keys.shape[2] > _AT_ONCE:  # moments in parts are rounded more often
        stands = ~turning.any(-1, keepdim=True)
        standing = torch.where(stands, mean_of(keys), standing)
    return standing, turning


class PromptMeans(NamedTuple):
    """What the keys of a prompt decide.

    Args:
        mean: of channels that stand, float32 [B, H, 1, D]; 0 of those that turn.
        rotary_mean: of channels that turn, at position 0; 0 of those that stand.
        shown: int32 [2] on the device of the keys: 1 if pairs are channels (2 p, 2 p + 1), else
            (p, p + r); 1 if some turn.
    """

    mean: Tensor
    rotary_mean: Tensor
    shown: Tensor


def interleave(halves: Tensor, neighbours: Tensor, tokens: int) -> bool:
    """Whether keys turn in pairs (2 p, 2 p + 1), rather than (p, p + r): models have either, and
    their configs do not say which.

    Args:
        halves: what `KeyMoments` of pairs (p, p + r) leave.
        neighbours: what those of pairs (2 p, 2 p + 1) leave.
        tokens: that were measured.
    """
    return tokens >= _FEWEST and bool(neighbours.sum() < DIFFERENT * halves.sum())


def moments_of(
    keys: Tensor, positions: Tensor, inv_freq: Tensor, interleaved: bool | None
) -> KeyMoments:
    """Moments of keys [B, H, n, D] at `positions`, of pairs as they show (`interleave`) where
    `interleaved` is None."""
    if interleaved is not None or keys.shape[2] < _FEWEST:
        return KeyMoments(inv_freq, bool(interleaved)).add(keys, positions)
    halves, neighbours = (
        KeyMoments(inv_freq, layout).add(keys, positions) for layout in (False, True)
    )
    return neighbours if interleave(halves.left, neighbours.left, keys.shape[2]) else halves


def _strongest(energy: Tensor, little: Tensor, together: int) -> Tensor:
    """The strongest pairs [B, H, 1, r], as few times `together` as leave out at most `little`
    [B, H, 1, 1]; at least once."""
    ordered, order = energy.sort(-1, descending=True)
    behind = ordered.flip(-1).cumsum(-1).flip(-1)[..., together::together]  # with the pair itself
    count = together * (1 + (behind > little).sum(-1, keepdim=True))
    return order.argsort(-1) < count


def _as_good(turned: Tensor, stood: Tensor, slack: Tensor) -> Tensor:
    return turned >= TIE * stood - slack


def _pair_energy(mean: Tensor, count: int, interleaved: bool) -> Tensor:
    squares = mean[..., :count].square()
    shape = (-1, 2) if interleaved else (2, -1)
    return squares.unflatten(-1, shape).sum(-1 if interleaved else -2)


def _by_channel(pairs: Tensor, interleaved: bool) -> Tensor:
    return pairs.repeat_interleave(2, -1) if interleaved else torch.cat([pairs, pairs], -1)
