"""Block-LDLQ: every code makes up for the errors of the codes before it.

    min over codes  tr( (W - Q) H (W - Q)^T ),     H = mean of x x^T over the inputs of the layer

With H^-1 = U^T U, U upper triangular, the error E = W - Q costs |E U^-1|^2. Column block b of
Z = E U^-1 follows from the blocks to its left,

    Z_b = ( W_b - sum_{a < b} Z_a U_ab - Q_b ) U_bb^-1

so blocks are rounded from left to right, each to what the ones before it have left to be made up
for. One block is one vector of the codebook (GPTQ, arXiv 2210.17323, has blocks of one column;
QuIP, arXiv 2307.13304, section 3, shows that this order of rounding is the best of its kind;
QuIP#, arXiv 2402.04396, section 4.1, has vectors). The scale of a group is chosen when its first
column is reached, by what the whole group then costs with feedback.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from ..errors import VQCalibrationError
from ..formats.catalog import LinearScheme
from ..formats.qoq import QoQScheme
from ..formats.scheme import VQScheme
from ..ops.reference.encode_weight import FACTORS, Assigner, least_squares, root_mean_square
from ..transforms import rotate

DAMPING = 0.01
"""Added to the diagonal of H, in units of its mean: inputs that the text does not show."""

_DAMPINGS = (1.0, 10.0, 100.0)  # times the damping asked for, until H has a Cholesky factor
_PANEL = 128  # columns between two matrix products that pass errors on


class Feedback:
    """What the inputs of a layer say about its weights; serves all layers with the same inputs.

    Args:
        moments: H [in, in], the mean of x x^T; any float dtype, not changed.
        scheme: its rotation turns inputs as it turns weights.
        rotation: packed signs, diagonal or matrix of that rotation.
        damping: see `DAMPING`.
        correlation: factor of the moments between different inputs, see `correlation.py`.
        where: name of a layer, for errors.
        unseen: the mean of x x^T of other inputs, to report errors on; None reports on `moments`.

    Attributes:
        damping: what was needed: the one asked for, or 10 or 100 times as much.
        ridge: the same as added to the diagonal of H.

    Raises:
        VQCalibrationError: H is not finite, or has no Cholesky factor with 100 times the damping.
    """

    def __init__(
        self,
        moments: Tensor,
        scheme: LinearScheme,
        rotation: Tensor | None = None,
        *,
        damping: float = DAMPING,
        correlation: float = 1.0,
        where: str = "the layer",
        unseen: Tensor | None = None,
    ) -> None:
        if not bool(moments.isfinite().all()):
            raise VQCalibrationError(
                f"the inputs of {where} hold NaN or infinity on the calibration text. Load the "
                "model in bfloat16 or float32."
            )
        self.moments, self.scheme, self.where = moments, scheme, where
        self.rotation, self.unseen, self.correlation = rotation, unseen, correlation
        turned = self._turned()
        diagonal = turned.diagonal().clone()
        mean = float(diagonal.mean())
        for more in _DAMPINGS:
            # A layer whose inputs are all zero is rounded as if they were anything.
            self.damping = damping * more
            self.ridge = self.damping * mean or 1.0
            turned.diagonal().copy_(diagonal + self.ridge)
            upper = _upper_of_inverse(turned / (mean + self.ridge))  # so a multiple of 1 becomes 1
            if upper is not None:
                self.upper = upper.float()
                return
        raise VQCalibrationError(
            f"the inputs of {where} on the calibration text give no usable second moments, even "
            f"with a damping of {self.damping:g}. Use a longer text, or add the layer to "
            "VQConfig(modules_to_not_convert=[...])."
        )

    def turned_by(self, rotation: Tensor | None) -> Feedback:
        """What the same inputs say about weights with another rotation of the same kind."""
        return Feedback(
            self.moments, self.scheme, rotation, damping=self.damping,
            correlation=self.correlation, where=self.where, unseen=self.unseen,
        )  # fmt: skip

    @cached_property
    def damped(self) -> Tensor:
        """H of the rotated inputs, as damped: [in, in] float32. Every band of tiles asks for it."""
        turned = self._turned()
        turned.diagonal().add_(self.ridge)
        return turned.float()

    def _turned(self) -> Tensor:
        moments = self.moments.to(torch.float64, copy=True)
        if self.correlation < 1:
            own = moments.diagonal().clone()
            moments.mul_(self.correlation).diagonal().copy_(own)
        if isinstance(self.scheme, QoQScheme):  # which does not rotate
            return moments
        # With x' = x D R, H' = R^T D H D R: what divided weights are multiplied with.
        turned = rotate(moments, self.scheme, self.rotation)
        return rotate(turned.T.contiguous(), self.scheme, self.rotation).contiguous()

    def energy(self, rows: Tensor) -> float:
        """tr(A H A^T) of rows A [n, in], not rotated: what they make of the inputs, squared."""
        return _energy(rows, self.moments)

    def reported_energy(self, rows: Tensor) -> float:
        """The same on held-out inputs, if there are any."""
        return _energy(rows, self.moments if self.unseen is None else self.unseen)


def _energy(rows: Tensor, moments: Tensor) -> float:
    rows = rows.float()
    found = float((rows @ moments.float()).mul_(rows).sum(dtype=torch.float64))
    return max(found, 0.0)  # rounding may leave less of rows that no input meets


def _upper_of_inverse(matrix: Tensor) -> Tensor | None:
    """U upper triangular with matrix^-1 = U^T U; None if `matrix` is not positive definite."""
    # With the columns in reverse order, matrix = M M^T has a lower M, so U = M^-1 in this order.
    lower, failed = torch.linalg.cholesky_ex(matrix.flip(0, 1))
    if int(failed) or not bool(lower.isfinite().all()):
        return None
    eye = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    inverse: Tensor = torch.linalg.solve_triangular(lower, eye, upper=False)
    return inverse.flip(0, 1)


def ldlq_rows(
    rows: Tensor,
    codebook: Tensor,
    scheme: VQScheme,
    feedback: Feedback,
    *,
    search: bool = True,
    refit: bool = True,
) -> tuple[Tensor, Tensor]:
    """Codes int64 [n, vectors, z] and scales fp16 [n, groups] of rotated rows [n, in] float32.

    Without feedback between columns (H a multiple of 1) they are those of `encode_weight`.

    Args:
        search: try FACTORS for every scale; otherwise it is the root mean square.
        refit: move every scale to the least weighted error of the codes found.
    """
    upper, assigner = feedback.upper, Assigner(codebook, scheme)
    size = scheme.group(rows.shape[1])
    columns = rows.T.contiguous()  # [in, n]: a block of columns is one piece of memory
    codes, found_scales = [], []
    for first in range(0, len(columns), size):
        part, later = slice(first, first + size), slice(first + size, None)
        group = _Group(columns[part], upper[part, part], assigner)
        found, scale, errors = group.fit(FACTORS if search else (1.0,), refit)
        codes.append(found)
        found_scales.append(scale)
        columns[later].addmm_(upper[part, later].T, errors, alpha=-1)
    return torch.cat(codes, 1), torch.stack(found_scales, 1)


class _Group:
    """The columns that share a scale, after feedback from all columns to their left.

    Args:
        columns: [size, n] float32, not changed.
        upper: U of these columns [size, size].
    """

    def __init__(self, columns: Tensor, upper: Tensor, assigner: Assigner) -> None:
        self.columns, self.upper, self.assigner = columns, upper, assigner
        self.whiten = whitening(upper)

    def fit(self, factors: tuple[float, ...], refit: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Codes [n, vectors, z], scales fp16 [n], and Z of the group [size, n]."""
        scale = root_mean_square(self.columns.T.contiguous())[:, 0]
        if len(factors) > 1:
            scale = self._searched(scale, factors)
        scale = scale.half()
        codes, entries = self._round(self.columns, scale.float())
        if refit:
            scale = self._refitted(entries, scale)
            codes, entries = self._round(self.columns, scale.float())
            scale = self._refitted(entries, scale)
        return codes, scale, self.whiten @ (self.columns - entries * scale.float())

    def _searched(self, rms: Tensor, factors: tuple[float, ...]) -> Tensor:
        """The candidate scale [n] of least cost with feedback."""
        n = len(rms)
        scales = torch.cat([rms * factor for factor in factors])
        columns = self.columns.repeat(1, len(factors))
        _, entries = self._round(columns, scales)
        cost = (self.whiten @ (columns - entries * scales)).square_().sum(0)
        best = cost.reshape(len(factors), n).argmin(0)
        return scales.reshape(len(factors), n).gather(0, best[None])[0]

    def _refitted(self, entries: Tensor, scale: Tensor) -> Tensor:
        """The least-squares scale as stored; one that is not finite stays so."""
        target, chosen = ((self.whiten @ part).T.contiguous() for part in (self.columns, entries))
        fitted = least_squares(target, chosen, scale.float()[:, None])[:, 0].half()
        return torch.where(scale.isfinite(), fitted, scale)

    def _round(self, columns: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Codes [n, vectors, z] with feedback inside the group, and their entries [size, n]."""
        unit, codes, entries = scale.clamp_min(1e-30), [], torch.empty_like(columns)

        def nearest(block: slice, left: Tensor) -> Tensor:
            codes.append(self.assigner.codes((left / unit).T.contiguous()))
            entries[block] = self.assigner.entries(codes[-1]).T
            return entries[block] * scale

        in_order(columns, self.upper, self.whiten, self.assigner.vector_size, nearest)
        return torch.stack(codes, 1), entries


def whitening(upper: Tensor) -> Tensor:
    """U^-T [n, n], by which errors of columns E [n, rows] become Z = U^-T E."""
    eye = torch.eye(len(upper), dtype=upper.dtype, device=upper.device)
    return torch.linalg.solve_triangular(upper, eye, upper=True).T.contiguous()


def in_order(
    columns: Tensor,
    upper: Tensor,
    whiten: Tensor,
    width: int,
    nearest: Callable[[slice, Tensor], Tensor],
) -> None:
    """Round columns [n, rows] from the first to the last, each block of `width` of them to what
    the ones before it have left to be made up for.

    Args:
        upper: U of these columns [n, n].
        whiten: `whitening(upper)`.
        nearest: given which columns, and what is left of them [width, rows], what they become.
    """
    left, errors = columns.clone(), torch.empty_like(columns)
    step = max(_PANEL // width, 1) * width
    for panel in range(0, len(left), step):
        end = min(panel + step, len(left))
        for first in range(panel, end, width):
            block, later = slice(first, first + width), slice(first + width, end)
            errors[block] = whiten[block, block] @ (left[block] - nearest(block, left[block]))
            left[later].addmm_(upper[block, later].T, errors[block], alpha=-1)
        done, rest = slice(panel, end), slice(end, None)
        left[rest].addmm_(upper[done, rest].T, errors[done], alpha=-1)
