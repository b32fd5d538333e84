"""Fit one weight matrix to QoQ's format: to the nearest values, or with calibration."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import VQFormatError
from ..formats.qoq import QoQScheme, decode, encode
from .ldlq import Feedback
from .qoq_calibrated import CLIPS, fit_rows

_CHUNK = 1 << 21  # weights held at once in float32


def fit_qoq(
    weight: Tensor,
    scheme: QoQScheme,
    where: str,
    feedback: Feedback | None = None,
    clips: tuple[float, ...] = CLIPS,
    in_turn: bool = True,
) -> tuple[dict[str, Tensor], float, float]:
    """Stored tensors of `weight` [out, in]; squared error over squared norm of it, and of the
    layer's outputs on the calibration text (nan without one).

    Args:
        feedback, clips, in_turn: as in `qoq_calibrated.fit_rows`; without feedback each weight is
            rounded to the nearest value.

    Raises:
        VQSchemeError: the dimensions do not fit.
        VQFormatError: weights are not finite, or too large or small for fp16 scales.
    """
    parts, sums = list[dict[str, Tensor]](), [0.0] * 4
    for rows in _chunks(weight):
        if feedback is None:
            parts.append(encode(rows, scheme, where))
        else:
            parts.append(
                fit_rows(rows, scheme, feedback, clips=clips, in_turn=in_turn, where=where)
            )
        left = decode(parts[-1], scheme, rows.shape[1]) - rows
        for index, values in enumerate((left, rows)):
            sums[index] += float(values.square().sum(dtype=torch.float64))
            sums[index + 2] += 0.0 if feedback is None else feedback.reported_energy(values)
    error, energy, output, whole = sums
    if error > 0.9 * energy:
        raise VQFormatError(
            f"{where} has weights too small for fp16 scales. "
            "Add the module to VQConfig(modules_to_not_convert=[...])."
        )
    tensors = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    none = math.nan if feedback is None else 0.0
    return tensors, error / energy if energy else 0.0, output / whole if whole else none


def _chunks(weight: Tensor) -> Iterator[Tensor]:
    for rows in weight.split(max(1, _CHUNK // weight.shape[1])):
        yield rows.float()
