"""What a prompt decides of its keys, means and factors: the reference implementations."""

from __future__ import annotations

import torch
from torch import Tensor

from ...transforms.key_smoothing import key_smoothing, squares
from ...transforms.smoothing import partners
from ..rotary_mean import PromptMeans, means_of, moments_of


def prompt_means(
    keys: Tensor,
    first: int,
    inv_freq: Tensor,
    interleaved: bool | None,
    strength: float = 0.0,
    together: int = 1,
) -> PromptMeans:
    """`measure_means` of keys [B, H, n, D] from position `first`, of pairs as they show where
    `interleaved` is None."""
    positions = torch.arange(first, first + keys.shape[2], device=keys.device)
    moments = moments_of(keys, positions, inv_freq, interleaved)
    mean, turning = means_of(moments, keys, strength, together)
    shown = torch.tensor([moments.interleaved, bool(turning.any())], dtype=torch.int32)
    return PromptMeans(mean, turning, shown.to(keys.device))


def prompt_smoothing(
    query: Tensor,
    keys: Tensor,
    mean: Tensor,
    turning: Tensor | None,
    pairs: int,
    shown: Tensor | bool,
) -> Tensor:
    """`transforms.key_smoothing` as a prompt decides it: float32 [B, H, 1, D].

    Args:
        query: [B, Hq, n, D].
        keys: [B, H, n, D].
        mean: of the keys, float32 [B, H, 1, D].
        turning: another mean of the keys, which turns with the position; None = 0.
        pairs: of channels that turn.
        shown: whether pairs are channels (2 p, 2 p + 1), not (p, p + `pairs`); or
            `PromptMeans.shown`.
    """
    heads = keys.shape[1]
    interleaved = bool(shown[0]) if isinstance(shown, Tensor) else shown
    partner = partners(keys.shape[3], 2 * pairs, "interleaved" if interleaved else "half")
    means = mean.square() if turning is None else mean.square() + turning.square()
    found = squares(query, heads), squares(keys, heads)
    return key_smoothing(*found, means, partner.to(keys.device))
