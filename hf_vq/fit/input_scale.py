"""The diagonal in front of a rotation: what inputs are divided by, and weights multiplied by.

    W x = (W diag(s)) (x / s)       s_i = h_i^1/8 / w_i^3/8     h_i = mean x_i^2,  w_i = mean W_oi^2

Rounding spreads its error evenly over the block of a rotation. Rounded each to its nearest entry,
weights lose least with s = (h / w)^1/4; where LDLQ passes errors on, which already spares the large
inputs, with s = w^-1/2 (the error is then geometric means of h and w, which no other s lessens).
Between the two is best on real models (docs/notebook.md).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

OF_INPUTS, OF_WEIGHTS = 0.125, 0.375
"""Exponents of h and w."""

_LEAST = 1e-8  # of the mean: inputs and columns that are all zero


def input_scale(moments: Tensor, weights: Iterable[Tensor]) -> Tensor:
    """s [in] of layers with the same input, float32; its geometric mean is 1.

    Args:
        moments: h [in].
        weights: their matrices [out, in]; each counts alike, whatever its size.
    """
    columns = [_mean_square(weight) for weight in weights]
    w = torch.stack([column / column.mean().clamp_min(1e-30) for column in columns]).mean(0)
    logs = OF_INPUTS * _logs(moments) - OF_WEIGHTS * _logs(w)
    return (logs - logs.mean()).exp()


def _mean_square(weight: Tensor) -> Tensor:
    parts = [part.float().square().sum(0) for part in weight.split(1 << 12)]
    return torch.stack(parts).sum(0) / len(weight)


def _logs(energies: Tensor) -> Tensor:
    energies = energies.float()
    return energies.clamp_min(float(energies.mean()) * _LEAST).clamp_min(1e-30).log()
