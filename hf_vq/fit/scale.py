"""The scale of a group of weights: from its norm, by least squares, or by search (the default).

Searching costs nothing at decode time and cuts the error of a Gaussian group of 128 by 13 to 17 %:
the codebook's outer entries are placed where the tails of this very group are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .assign import Assigner

FACTORS = (0.80, 0.85, 0.90, 0.95, 1.0, 1.05, 1.10, 1.15)
"""Candidates of the search, in units of the group's root mean square."""

SCALAR_FACTORS = tuple(0.76 * 1.033**step for step in range(16))
"""Those of codebooks of single weights: twice as many lose 1 % less there, and half of that where
an entry is several weights."""


def root_mean_square(groups: Tensor) -> Tensor:
    """[..., groups, size] -> [..., groups, 1]."""
    return groups.square().mean(-1, keepdim=True).sqrt()


def search_scale(groups: Tensor, assigner: Assigner, factors: tuple[float, ...]) -> Tensor:
    """The candidate scale [n, 1] with the least squared error for each of `groups` [n, size]."""
    rms = root_mean_square(groups)
    best = torch.full_like(rms, torch.inf)
    scale = rms
    for factor in factors:
        candidate = rms * factor
        unit = groups / candidate.clamp_min(1e-30)
        distance = assigner.distance(unit.reshape(-1, assigner.vector_size))
        error = distance.reshape(len(groups), -1).sum(1, keepdim=True) * candidate.square()
        better = error < best
        best, scale = torch.where(better, error, best), torch.where(better, candidate, scale)
    return scale


def least_squares(groups: Tensor, chosen: Tensor, fallback: Tensor) -> Tensor:
    """The scale that minimises |group - scale * chosen|^2; `fallback` where that is not positive.

    Args:
        groups: [..., size] weights.
        chosen: [..., size] entries chosen for them.
        fallback: [..., 1].
    """
    along = (groups * chosen).sum(-1, keepdim=True)
    energy = chosen.square().sum(-1, keepdim=True)
    fitted = along / energy.clamp_min(1e-30)
    return torch.where((fitted > 0) & (energy > 0), fitted, fallback)
