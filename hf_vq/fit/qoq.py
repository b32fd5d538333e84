"""Fit one weight matrix to QoQ's format: each weight to the nearest value of its group's grid."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import VQFormatError
from ..formats.qoq import QoQScheme, decode, encode

_CHUNK = 1 << 21  # weights held at once in float32


def fit_qoq(weight: Tensor, scheme: QoQScheme, where: str) -> tuple[dict[str, Tensor], float]:
    """Stored tensors of `weight` [out, in], and squared error over squared norm.

    Raises:
        VQSchemeError: the dimensions do not fit.
        VQFormatError: weights are not finite, or too large or small for fp16 scales.
    """
    parts, error, energy = [], 0.0, 0.0
    for rows in _chunks(weight):
        parts.append(encode(rows, scheme, where))
        left = decode(parts[-1], scheme, rows.shape[1]) - rows
        error += float(left.square().sum(dtype=torch.float64))
        energy += float(rows.square().sum(dtype=torch.float64))
    if error > 0.9 * energy:
        raise VQFormatError(
            f"{where} has weights too small for fp16 scales. "
            "Add the module to VQConfig(modules_to_not_convert=[...])."
        )
    tensors = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    return tensors, error / energy if energy else 0.0


def _chunks(weight: Tensor) -> Iterator[Tensor]:
    for rows in weight.split(max(1, _CHUNK // weight.shape[1])):
        yield rows.float()
