"""Codes of QoQ (QServe, sections 4.1 and 4.3.4): integers of 4 bits inside integers of 8 bits, with
weights clipped by what that costs the layer's outputs, and with errors fed back (GPTQ).

    cost of an error E [rows, n] in n columns that share a grid

    feedback    | U^-T E^T |^2      what is left after later columns have made up for it (ldlq.py)
    without     tr( E H E^T )       H of these columns alone: of the layer's outputs on the text

A grid is the range of its weights; clipping tries a part of it, and takes the one of least cost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats.qoq import LARGEST_CODE, PROTECTIVE, Grid, QoQScheme, grid_of, spread
from .ldlq import Feedback, in_order, whitening

CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Parts of a range that are tried: the codes beyond them are cut off."""


def fit_rows(
    rows: Tensor,
    scheme: QoQScheme,
    feedback: Feedback,
    *,
    clips: tuple[float, ...] = CLIPS,
    in_turn: bool = True,
    where: str = "weight",
) -> dict[str, Tensor]:
    """The stored tensors of rows [out, in] float32, by key.

    Args:
        feedback: what calibration says of the layer's inputs.
        clips: parts of a range to try.
        in_turn: whether columns make up for the errors of those before them.
        where: name of the layer, for errors.

    Raises:
        VQSchemeError, VQFormatError: as in `formats.qoq.grid_of`.
    """
    whole = grid_of(rows, scheme, where)
    scale, codes = whole.scale[:, 0], []
    left, grids = rows.T.contiguous(), list[_Grids]()  # [in, out]: a group is one piece of memory
    for first in range(0, len(left), whole.group):
        part, later = slice(first, first + whole.group), slice(first + whole.group, None)
        cost = feedback.upper[part, part] if in_turn else _lower(feedback.damped[part, part]).T
        group = _Group(left[part], cost, in_turn)
        grids.append(group.fit(clips, scale if scheme.group else None))
        codes.append(group.codes(grids[-1]))
        if in_turn:
            errors = group.whiten @ (left[part] - grids[-1].values(codes[-1]))
            left[later].addmm_(feedback.upper[part, later].T, errors, alpha=-1)
    if not scheme.group:
        scale = grids[0].scale
    step, zero = (torch.stack([getattr(g, key) for g in grids], 1) for key in ("step", "zero"))
    grid = Grid(scheme, whole.group, scale[:, None], step, zero)
    return grid.stored(torch.cat(codes).T.to(torch.uint8).contiguous())


@dataclass(frozen=True)
class _Grids:
    """The sixteen values (q * step - zero) * scale of each row of n, float32 [n] each."""

    scale: Tensor
    step: Tensor
    zero: Tensor
    most: float  # scales of the largest weight that may be coded

    def codes(self, weights: Tensor) -> Tensor:
        """Codes of the nearest values to weights [columns, n]."""
        level = (weights / self.scale.clamp_min(1e-30)).clamp_(-self.most, self.most)
        return level.add_(self.zero).div_(self.step).round_().clamp_(0, LARGEST_CODE)

    def values(self, codes: Tensor) -> Tensor:
        """What codes [columns, n] stand for."""
        return (codes * self.step - self.zero) * self.scale


class _Group:
    """Columns that share a grid, after feedback from all columns to their left.

    Args:
        columns: [size, n] float32, not changed.
        upper: U of these columns [size, size]; without turns, of their inputs alone.
        in_turn: as in `fit_rows`.
    """

    def __init__(self, columns: Tensor, upper: Tensor, in_turn: bool) -> None:
        self.columns, self.upper, self.in_turn = columns, upper, in_turn
        self.whiten = whitening(upper) if in_turn else upper

    def fit(self, clips: tuple[float, ...], scale: Tensor | None) -> _Grids:
        """The grid of least cost for each row."""
        low, high = self.columns.amin(0).clamp_max(0), self.columns.amax(0).clamp_min(0)
        most = math.inf if scale is None else PROTECTIVE
        tried = [_Grids(*spread(low * clip, high * clip, scale), most) for clip in clips]
        if len(tried) == 1:
            return tried[0]
        scales, steps, zeros = (
            torch.cat([getattr(g, key) for g in tried]) for key in ("scale", "step", "zero")
        )
        many, n = _Grids(scales, steps, zeros, most), len(low)
        columns = self.columns.repeat(1, len(clips))
        errors = columns - many.values(self._round(columns, many))
        cost = (self.whiten @ errors).square_().sum(0)
        best = cost.reshape(len(clips), n).argmin(0) * n + torch.arange(n, device=cost.device)
        return _Grids(scales[best], steps[best], zeros[best], most)

    def codes(self, grids: _Grids) -> Tensor:
        """Codes [size, n], float32."""
        return self._round(self.columns, grids)

    def _round(self, columns: Tensor, grids: _Grids) -> Tensor:
        if not self.in_turn:
            return grids.codes(columns)
        found = torch.empty_like(columns)

        def nearest(block: slice, left: Tensor) -> Tensor:
            found[block] = grids.codes(left)
            return grids.values(found[block])

        in_order(columns, self.upper, self.whiten, 1, nearest)
        return found


def _lower(moments: Tensor) -> Tensor:
    """L with H = L L^T, of damped moments."""
    return torch.linalg.cholesky(moments.double()).float()
