"""Block-LDLQ inside the blocks of a rotation, for statistics of few tokens.

    min over codes  sum over blocks b  tr( E_b H_b E_b^T ),     E = W - Q

`ldlq` passes errors on through a whole row, by moments H [in, in] that need many thousand tokens:
with few it fits their noise. The moments of a block of 128 inputs follow from a thousand. And no
block waits for another: all blocks of a matrix are rounded at once (`ops.round_weight`).
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from ..errors import VQCalibrationError
from ..formats.scheme import VQScheme
from ..ops import encode_weight, round_weight
from ..ops.reference.encode_weight import Assigner, root_mean_square
from ..transforms import rotate

DAMPINGS = (0.1, 0.3, 1.0, 10.0)
"""Candidates of what is added to the diagonal of rotated moments, in units of its mean. With the
last, almost nothing is passed on, as in rounding to nearest."""

DAMPING = DAMPINGS[1]
"""The one of moments that are not in halves."""

CORRELATION = 0.5
"""Factor of the moments between different inputs: half of what few tokens show is chance."""


class BlockFeedback:
    """What the inputs of a layer say about its weights, for each block of the rotation.

    Args:
        moments: H of each block of inputs [blocks, size, size]; `size` is the rotation's block or a
            multiple of it. Or of two halves of the inputs, [2, blocks, size, size], whose sum is H:
            then the damping of each block is the one of DAMPINGS that is best for both halves, each
            rounded with what the other one shows.
        scheme: its rotation turns inputs; it must have one.
        rotation: packed signs, diagonal or matrix of that rotation.
        where: name of a layer, for errors.

    Attributes:
        damping: of each block of the rotation [blocks].
        upper: U of each block with (rotated H)^-1 = U^T U, [blocks, size, size] float32. A block
            has the size of the rotation's, or of a group with one scale if that is less.

    Raises:
        VQCalibrationError: the moments are not finite.
    """

    ridge = 0.0  # the damping is in the energy
    unseen = None  # no inputs are held out

    def __init__(
        self, moments: Tensor, scheme: VQScheme, rotation: Tensor | None, *, where: str = "layer"
    ) -> None:
        if not bool(moments.isfinite().all()):
            raise VQCalibrationError(
                f"the inputs of {where} hold NaN or infinity. Load the model in bfloat16 or "
                "float32, or quantize it with VQConfig(activations=None)."
            )
        self.scheme, self.where, self._given = scheme, where, moments
        *_, count, size, _ = moments.shape
        self._in_features = count * size
        self._turn = self._rotation(rotation, moments.device)
        parts = moments.double() if moments.ndim == 4 else moments[None].double()
        halves = [_diagonal_blocks(part, scheme.block(self._in_features)) for part in parts]
        blocks = _shrunk(torch.stack(halves).sum(0))
        self.damping = torch.full_like(blocks[:, 0, 0], DAMPING)
        if len(halves) == 2:
            self.damping = self._chosen(halves[0], halves[1])
        ridge, upper = self._upper(self._turned(blocks), self.damping)
        self.upper = upper.float()
        self._passed_on: dict[int, Tensor] = {}
        # Of rows that are not rotated: |w'|^2 of the rotated ones is |w / d|^2.
        divided = ridge[:, None] / self._turn.square().sum(2)
        self._damped = (blocks + torch.diag_embed(divided)).float()

    def _turned(self, blocks: Tensor) -> Tensor:
        """The moments of rotated inputs."""
        return self._turn.transpose(1, 2) @ blocks @ self._turn

    def _upper(self, turned: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
        """What is added to the diagonal of each block of rotated moments [blocks], and U of each.

        Factorized in their dtype.
        """
        mean = turned.diagonal(dim1=1, dim2=2).mean(1)
        # A block whose inputs are all zero is rounded as if they were anything.
        ridge = torch.where(mean > 0, damping * mean, 1.0)
        eye = torch.eye(turned.shape[1], dtype=turned.dtype, device=turned.device)
        turned = (turned + ridge[:, None, None] * eye) / (mean + ridge)[:, None, None]
        turned = self._with_one_scale(turned)
        # With columns in reverse order, H = M M^T has a lower M, so U = M^-1 in this order.
        lower = torch.linalg.cholesky(turned.flip(1, 2))
        eye = eye[: turned.shape[1], : turned.shape[1]].expand_as(turned)
        return ridge, torch.linalg.solve_triangular(lower, eye, upper=False).flip(1, 2)

    def _chosen(self, one: Tensor, other: Tensor) -> Tensor:
        """The damping of each block [blocks].

        Errors of rounding are alike in all columns and independent. Passed on by U with a diagonal
        of ones, they make tr(U H U^T) of inputs with second moments H.
        """
        costs = torch.zeros(len(DAMPINGS), len(one), device=one.device)
        for shown, unseen in ((one, other), (other, one)):
            # In float32: with all of these dampings, that suffices to compare them.
            seen = self._turned(_shrunk(shown)).float()
            turned = self._with_one_scale(self._turned(unseen)).float()
            for cost, damping in zip(costs, DAMPINGS, strict=True):
                _, upper = self._upper(seen, torch.full_like(cost, damping))
                unit = upper / upper.diagonal(dim1=1, dim2=2)[:, :, None]
                made = ((unit @ turned) * unit).sum((1, 2))
                cost += made.unflatten(0, (len(one), -1)).sum(1)
        return torch.tensor(DAMPINGS, dtype=one.dtype, device=one.device)[costs.argmin(0)]

    def _with_one_scale(self, turned: Tensor) -> Tensor:
        """The diagonal blocks of rotated moments whose columns share a scale."""
        return _diagonal_blocks(turned, min(turned.shape[1], self.scheme.group(self._in_features)))

    @cached_property
    def moments(self) -> Tensor:
        """Damped rotated H of each block, up to a factor: (U^T U)^-1, [blocks, size, size]."""
        eye = torch.eye(self.upper.shape[1], dtype=torch.float64, device=self.upper.device)
        root = torch.linalg.solve_triangular(
            self.upper.double(), eye.expand_as(self.upper), upper=True
        )
        return (root @ root.mT).float()

    def passed_on(self, width: int) -> Tensor:
        """What later columns get of the error of each: `feedback` of `ops.round_weight`.

        Args:
            width: columns of a vector, which are rounded at once.
        """
        if width not in self._passed_on:
            rows = self.upper.unflatten(1, (-1, width))  # [blocks, vectors, width, size]
            own = _diagonal_blocks(self.upper, width).unflatten(0, rows.shape[:2])
            unit = torch.linalg.solve_triangular(own, rows, upper=True).flatten(1, 2)
            vector = torch.arange(unit.shape[1], device=unit.device) // width
            later = vector[:, None] < vector
            self._passed_on[width] = -(unit * later).mT.contiguous()
        return self._passed_on[width]

    def turned_by(self, rotation: Tensor | None) -> BlockFeedback:
        """What the same inputs say about weights with another rotation of the same kind."""
        return BlockFeedback(self._given, self.scheme, rotation, where=self.where)

    def energy(self, rows: Tensor) -> float:
        """tr(A H A^T) of rows A [n, in], not rotated, with H as damped and without what is outside
        of the blocks: what they make of the inputs, squared."""
        parts = rows.float().unflatten(1, (len(self._damped), -1)).transpose(0, 1)
        return float(((parts @ self._damped) * parts).sum(dtype=torch.float64))

    def reported_energy(self, rows: Tensor) -> float:
        """`energy`, as there are no inputs that were not seen."""
        return self.energy(rows)

    def _rotation(self, rotation: Tensor | None, device: torch.device) -> Tensor:
        """R of each block, x' = x R: [blocks, size, size]."""
        block = self.scheme.block(self._in_features)
        unit = torch.eye(block, dtype=torch.float64, device=device)
        turned = rotate(unit.repeat(1, self._in_features // block), self.scheme, rotation)
        return turned.unflatten(1, (-1, block)).transpose(0, 1)


def _shrunk(blocks: Tensor) -> Tensor:
    """The same with CORRELATION between different inputs."""
    own = torch.diag_embed(blocks.diagonal(dim1=1, dim2=2))
    return CORRELATION * blocks + (1 - CORRELATION) * own


def _diagonal_blocks(moments: Tensor, size: int) -> Tensor:
    """The blocks [.., size, size] on the diagonals of larger ones [blocks, n, n]."""
    count = moments.shape[1] // size
    tiles = moments.unflatten(2, (count, size)).unflatten(1, (count, size))  # [b, i, s, j, s]
    return tiles.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).reshape(-1, size, size)


def ldlq_blocks(
    rows: Tensor,
    codebook: Tensor,
    scheme: VQScheme,
    feedback: BlockFeedback,
    *,
    factors: tuple[float, ...],
    refit: bool,
) -> tuple[Tensor, Tensor]:
    """Codes, integers [n, vectors, z], and scales fp16 [n, groups] of rotated rows [n, in] float32.

    Args:
        factors: candidates of a scale, in units of the group's root mean square; chosen before any
            error is passed on.
        refit: move every scale to the least weighted error of the codes found.
    """
    if len(factors) == 1 and not refit:
        groups = rows.unflatten(1, (-1, scheme.group(rows.shape[1])))
        scale = (root_mean_square(groups)[..., 0] * factors[0]).half()
    else:
        _, scale = encode_weight(rows, codebook, scheme, factors, refit)
    codes = round_weight(rows, scale, codebook, scheme, feedback.passed_on(scheme.vector_size))
    return codes, _refitted(rows, codes, scale, codebook, scheme, feedback) if refit else scale


def _refitted(
    rows: Tensor,
    codes: Tensor,
    scale: Tensor,
    codebook: Tensor,
    scheme: VQScheme,
    feedback: BlockFeedback,
) -> Tensor:
    """The scales of the least weighted error of codes, as stored."""
    entries = Assigner(codebook, scheme).entries(codes.flatten(0, 1).long()).reshape(rows.shape)
    moments = feedback.moments
    weighted = (entries.unflatten(1, moments.shape[:2]).transpose(0, 1) @ moments).transpose(0, 1)
    weighted = weighted.flatten(1).unflatten(1, (scale.shape[1], -1))
    along, energy = ((part.view_as(weighted) * weighted).sum(2) for part in (rows, entries))
    fitted = (along / energy.clamp_min(1e-30)).half()
    return torch.where((fitted > 0) & scale.isfinite(), fitted, scale)
