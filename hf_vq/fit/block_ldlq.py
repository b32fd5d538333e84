"""Block-LDLQ inside wide blocks of columns, for statistics of few tokens.

    min over codes  sum over blocks b  tr( E_b H_b E_b^T ),     E = W - Q

`ldlq` believes moments H [in, in] of many thousand tokens; with few it fits their noise. Here
moments between different inputs count for less than half, and for less still where two halves of
the tokens disagree. Blocks of at most WIDTH inputs bound what long rows cost.

    chunk 0   chunk 1   chunk 2     a chunk of columns is rounded in all blocks at once
    >>>>>>>|->>>>>>>>|->>>>>>>>     (`ops.round_weight`), after the errors of those before it

With H = V V^T, V upper triangular, that is the sum of |E V|^2, and what chunk c adds to it is
E_c V_cc and the errors before it times V: H is not inverted.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import VQCalibrationError
from ..formats.scheme import VQScheme
from ..ops import encode_weight, round_weight
from ..ops.reference.encode_weight import Assigner, root_mean_square
from ..transforms import rotate

WIDTH = 2048
"""Most inputs of a block, unless a rotation's block is wider: the factorization of a block takes
the cube of it."""

DAMPING = 0.01
"""Added to the diagonal of rotated moments, in units of its mean in a block of the rotation."""

CORRELATION = 0.4
"""Factor of the moments between different inputs: the text to come differs from these tokens."""


def width_of(in_features: int, block: int) -> int:
    """Inputs of each block of H: a multiple of `block`, the rotation's. Of the last block, some may
    be behind the row's end (`padded`)."""
    count = in_features // block
    blocks = math.ceil(count / max(1, WIDTH // block))
    return block * math.ceil(count / blocks)


def padded(x: Tensor, width: int) -> Tensor:
    """The last dimension of `x` in blocks [.., blocks, width], with zeros at its end."""
    return F.pad(x, (0, -x.shape[-1] % width)).unflatten(-1, (-1, width))


class BlockFeedback:
    """What the inputs of a layer say about its weights, for each block of columns.

    Args:
        moments: H of each block of inputs [blocks, size, size]; `size` is the rotation's block or a
            multiple of it (`width_of`). Or of two halves of the inputs, [2, blocks, size, size],
            whose sum is H: then moments between different inputs count as far as halves agree.
        scheme: its rotation turns inputs; it must have one.
        rotation: packed signs, diagonal or matrix of that rotation.
        in_features: of the layer; None = blocks * size, nothing is behind the row's end.
        where: name of a layer, for errors.

    Attributes:
        correlation: factor of the moments between different inputs of each block [blocks].
        factor: V of each block with rotated H = V V^T, upper triangular, [blocks, size, size]
            float32.
        chunk: columns that are rounded at once: a rotation's block, or a group with one scale if
            that is less.

    Raises:
        VQCalibrationError: the moments are not finite.
    """

    ridge = 0.0  # the damping is in the energy
    unseen = None  # no inputs are held out

    def __init__(
        self,
        moments: Tensor,
        scheme: VQScheme,
        rotation: Tensor | None,
        *,
        in_features: int | None = None,
        where: str = "layer",
    ) -> None:
        *_, count, size, _ = moments.shape
        # An input that is not finite shows in its own moment.
        if not bool(moments.diagonal(dim1=-2, dim2=-1).isfinite().all()):
            raise VQCalibrationError(
                f"the inputs of {where} hold NaN or infinity. Load the model in bfloat16 or "
                "float32, or quantize it with VQConfig(activations=None)."
            )
        self.scheme, self.where, self._given = scheme, where, moments
        self.in_features = in_features or count * size
        block = scheme.block(self.in_features)
        self.chunk = min(block, scheme.group(self.in_features))
        halves = moments.float() if moments.ndim == 4 else moments[None].float()
        blocks = halves.sum(0)
        agreement = _agreement(halves, blocks)
        self.correlation = CORRELATION * agreement
        _shrink(blocks, self.correlation)
        turn = self._rotation(rotation, moments.device, count * size).unflatten(0, (count, -1))
        turned = _turned(_turned(blocks, turn), turn)
        # Of each block of the rotation: one huge input must not drown the others of a wide block.
        mean = turned.diagonal(dim1=1, dim2=2).unflatten(1, (-1, block)).mean(2)
        # A block whose inputs are all zero is rounded as if they were anything.
        # Halves that disagree say little of the inputs' power either.
        damping = DAMPING / agreement.clamp_min(DAMPING)[:, None]
        ridge = torch.where(mean > 0, damping * mean, 1.0)
        turned.diagonal(dim1=1, dim2=2).add_(ridge.repeat_interleave(block, 1))
        turned /= (mean + ridge).mean(1)[:, None, None]
        self.factor = _upper_factor(turned)
        self._chunks = _diagonal_blocks(turned, self.chunk)
        self._passed_on: dict[int, Tensor] = {}
        # Of rows that are not rotated: |w'|^2 of the rotated ones is |w / d|^2.
        divided = ridge[..., None] / turn.square().sum(3)
        blocks.diagonal(dim1=1, dim2=2).add_(divided.flatten(1))
        self._damped = _diagonal_blocks(blocks, block)[: self.in_features // block]

    @cached_property
    def whiten(self) -> Tensor:
        """V of each chunk [blocks, chunks, chunk, chunk]: errors [.., chunk] times it make Z of
        `ldlq`."""
        return _diagonal_blocks(self.factor, self.chunk).unflatten(0, (len(self.factor), -1))

    @cached_property
    def unwhiten(self) -> Tensor:
        """The inverse of `whiten`."""
        eye = torch.eye(self.chunk, device=self.factor.device).expand_as(self.whiten)
        return torch.linalg.solve_triangular(self.whiten, eye, upper=True)

    @property
    def moments(self) -> Tensor:
        """Damped rotated H of each chunk, up to a factor: [chunks, chunk, chunk]."""
        return self._chunks[: self.in_features // self.chunk]

    def passed_on(self, width: int) -> Tensor:
        """What later columns of each chunk get of the error of each: `feedback` of
        `ops.round_weight` [blocks, chunks, chunk, chunk].

        Args:
            width: columns of a vector, which are rounded at once.
        """
        if width not in self._passed_on:
            chunks = self.unwhiten.flatten(0, 1)
            rows = chunks.unflatten(1, (-1, width))  # [chunks, vectors, width, chunk]
            own = _diagonal_blocks(chunks, width).unflatten(0, rows.shape[:2])
            unit = torch.linalg.solve_triangular(own, rows, upper=True).flatten(1, 2)
            vector = torch.arange(self.chunk, device=unit.device) // width
            later = vector[:, None] < vector
            found = -(unit * later).mT.contiguous()
            self._passed_on[width] = found.unflatten(0, (len(self.factor), -1))
        return self._passed_on[width]

    def turned_by(self, rotation: Tensor | None) -> BlockFeedback:
        """What the same inputs say about weights with another rotation of the same kind."""
        return BlockFeedback(
            self._given, self.scheme, rotation, in_features=self.in_features, where=self.where
        )

    def energy(self, rows: Tensor) -> float:
        """tr(A H A^T) of rows A [n, in], not rotated, with H as damped and without what is outside
        of the rotation's blocks: about what they make of the inputs, squared."""
        parts = rows.float().unflatten(1, (len(self._damped), -1)).transpose(0, 1)
        return float(torch.linalg.vecdot(parts @ self._damped, parts).sum(dtype=torch.float64))

    def reported_energy(self, rows: Tensor) -> float:
        """`energy`, as there are no inputs that were not seen."""
        return self.energy(rows)

    def _rotation(self, rotation: Tensor | None, device: torch.device, columns: int) -> Tensor:
        """R of each block of the rotation, x' = x R: [blocks, size, size]; 1 behind the row."""
        block = self.scheme.block(self.in_features)
        unit = torch.eye(block, dtype=torch.float64, device=device)
        turned = rotate(unit.repeat(1, self.in_features // block), self.scheme, rotation)
        found = turned.unflatten(1, (-1, block)).transpose(0, 1)
        behind = unit.expand((columns - self.in_features) // block, -1, -1)
        return torch.cat([found, behind]).float()


def _agreement(halves: Tensor, blocks: Tensor) -> Tensor:
    """The factor of the moments between different inputs of each block [blocks] that brings them
    nearest to those of all inputs there are; 1 where nothing is in halves.

    Moments are compared in units of the inputs' power. With H the mean of two independent H_i, it
    is <H, all> / <H, H>, and <H_1, H_2> has the expectation of <H, all>.
    """
    if len(halves) == 1:
        return torch.ones_like(blocks[:, 0, 0])
    power = blocks.diagonal(dim1=1, dim2=2)
    unit = torch.where(power > 0, power.rsqrt(), 0.0)
    others = (halves * unit[:, :, None]).mul_(unit[:, None])
    others.diagonal(dim1=2, dim2=3).zero_()
    one, other = others.flatten(2)
    both = 4 * torch.linalg.vecdot(one, other)
    apart = (one - other).square_().sum(1)  # of their sum: four times <one, other> more
    return (both / (both + apart).clamp_min(1e-30)).clamp(0.0, 1.0)


def _shrink(blocks: Tensor, correlation: Tensor) -> None:
    """Multiply the moments between different inputs."""
    own = blocks.diagonal(dim1=1, dim2=2)
    kept = own.clone()
    blocks *= correlation[:, None, None]
    own.copy_(kept)


def _turned(blocks: Tensor, turn: Tensor) -> Tensor:
    """(R^T H)^T of each symmetric or half turned block H, R block by block: once is H R after a
    second time.

    Args:
        turn: [blocks, parts, size, size].
    """
    rows = blocks.unflatten(1, turn.shape[1:3])  # [blocks, parts, size, width]
    return (turn.mT @ rows).flatten(1, 2).mT


def _upper_factor(moments: Tensor) -> Tensor:
    """V with moments = V V^T, upper triangular, of each block, in float32."""
    # With columns in reverse order, H = M M^T has a lower M.
    reverse = moments.flip(1, 2)
    lower, failed = torch.linalg.cholesky_ex(reverse)
    if bool(failed.any()):  # the rounding of float32 may leave no positive definite matrix
        lower = torch.linalg.cholesky(reverse.double()).float()
    return lower.flip(1, 2)


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

    The scale of a chunk is chosen when it is reached; that of a group of several chunks before any
    error is passed on.

    Args:
        factors: candidates of a scale, in units of the group's root mean square.
        refit: move every scale to the least weighted error of the codes found.
    """
    size, factor, chunk = rows.shape[1], feedback.factor, feedback.chunk
    one, assigner = replace(scheme, scale_group=chunk), Assigner(codebook, scheme)
    whole = scheme.group(size) > chunk
    scale = units = torch.empty(0)
    if whole:
        scale = _scale(rows, codebook, scheme, factors, refit)
        units = padded(
            scale.repeat_interleave(scheme.group(size) // chunk, 1), factor.shape[1] // chunk
        )
    # [blocks, n, width]: rows, and errors where they are rounded.
    left = padded(rows, factor.shape[1]).transpose(0, 1).contiguous()
    passed_on = feedback.passed_on(scheme.vector_size)
    codes, scales = [], []
    for first in range(0, left.shape[2], chunk):
        part, index = slice(first, first + chunk), first // chunk
        own, whiten = left[:, :, part], feedback.whiten[:, index]
        before = left[:, :, :first] @ factor[:, :first, part]  # of Z
        wanted = torch.baddbmm(own, before, feedback.unwhiten[:, index])
        flat = wanted.transpose(0, 1).flatten(1)
        if whole:
            unit = units[:, :, index].contiguous()
        else:
            unit = _scale(flat, codebook, one, factors, refit)
        found = round_weight(flat, unit, codebook, one, passed_on[:, index].contiguous())
        entries = assigner.entries(found.flatten(0, 1).long()).view(len(rows), -1, chunk)
        entries = entries.transpose(0, 1)
        if refit and not whole:
            unit = _least_squares(wanted @ whiten, entries @ whiten, unit.T).T
        own.addcmul_(entries, unit.T.float()[..., None], value=-1)
        codes.append(found.unflatten(1, (len(factor), -1)))
        scales.append(unit)
    together = torch.stack(codes, 2).flatten(1, 3)[:, : size // scheme.vector_size]
    if not whole:
        return together, torch.stack(scales, 2).flatten(1)[:, : size // chunk].contiguous()
    return together, _refitted(rows, together, scale, assigner, feedback) if refit else scale


def _scale(
    rows: Tensor, codebook: Tensor, scheme: VQScheme, factors: tuple[float, ...], refit: bool
) -> Tensor:
    """The scales fp16 [n, groups] of the least squared error."""
    if len(factors) == 1 and not refit:
        groups = rows.unflatten(1, (-1, scheme.group(rows.shape[1])))
        return (root_mean_square(groups)[..., 0] * factors[0]).half()
    return encode_weight(rows, codebook, scheme, factors, refit)[1]


def _least_squares(target: Tensor, made: Tensor, scale: Tensor) -> Tensor:
    """The scale fp16 of entries that is nearest to a target [.., numbers]; one that is not positive
    or finite stays as it was."""
    along, energy = (torch.linalg.vecdot(one, made) for one in (target, made))
    fitted = (along / energy.clamp_min(1e-30)).half()
    return torch.where((fitted > 0) & scale.isfinite(), fitted, scale)


def _refitted(
    rows: Tensor, codes: Tensor, scale: Tensor, assigner: Assigner, feedback: BlockFeedback
) -> Tensor:
    """The scales of the least weighted error of codes, as stored, for groups of several chunks."""
    entries = assigner.entries(codes.flatten(0, 1).long()).reshape(rows.shape)
    moments = feedback.moments
    weighted = (entries.unflatten(1, moments.shape[:2]).transpose(0, 1) @ moments).transpose(0, 1)
    weighted = weighted.flatten(1).unflatten(1, (scale.shape[1], -1))
    along, energy = ((part.view_as(weighted) * weighted).sum(2) for part in (rows, entries))
    fitted = (along / energy.clamp_min(1e-30)).half()
    return torch.where((fitted > 0) & scale.isfinite(), fitted, scale)
