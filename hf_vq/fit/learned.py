"""Codebooks learned from the weight itself, without data: per tensor (AQLM) or per tile (GPTVQ).

The weight is read in chunks of rows, as for universal codebooks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..formats.scheme import VQScheme
from ..ops.reference.encode_weight import Assigner
from .kmeans import SAMPLES_PER_ENTRY, kmeans
from .rows import RowFitter

Rows = Callable[[int, int], Tensor]  # (first, last) -> rotated rows [n, in] float32


STEPS = tuple(0.5 + 0.02 * i for i in range(26))
"""Candidates for the step of integer entries, in units of the one that reaches every entry."""


def tensor_codebook(
    rows: Rows, shape: torch.Size, fitter: RowFitter, seed: int
) -> tuple[Tensor, float]:
    """One codebook per residual stage, each learned on what the stages before it leave.

    Integer entries are rounded as soon as they are learned, so that the next stage knows what
    rounding costs; all stages have the step of the first.

    Args:
        rows: reads rows of the weight.
        shape: (out, in) of the weight.

    Returns:
        [z, entries, x] as stored, and what 1 in it is for rows whose root mean square is 1.
    """
    scheme, step = fitter.scheme, 1.0
    vectors_per_row = shape[1] // scheme.vector_size
    wanted = -(-SAMPLES_PER_ENTRY * scheme.entries // vectors_per_row)  # rows that suffice
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(shape[0], generator=generator)[:wanted].tolist()
    sample = torch.cat([_unit(rows(row, row + 1), fitter) for row in sorted(chosen)])
    rest = sample.reshape(-1, scheme.vector_size)
    stages = []
    for stage in range(scheme.residuals):
        entries = kmeans(rest, scheme.entries, seed=seed + stage)
        if scheme.largest_entry and stage == 0:
            used = _used(entries, rest, scheme)
            step = integer_step(entries, used, scheme, scheme.residuals - 1)
            entries, rest = entries / step, rest / step
        entries = as_stored(entries, scheme)
        stages.append(entries)
        one = Assigner(entries[None], scheme, learned=True)
        rest = rest - one.entries(one.codes(rest))
    return torch.stack(stages), step


def integer_step(entries: Tensor, used: Tensor, scheme: VQScheme, unknown: int = 0) -> float:
    """The step with the least error of rounding `entries` [n, x], each counted as often as it is
    `used` [n].

    What the largest integer does not reach is cut off.

    Args:
        unknown: stages that are still to be learned. Their entries are smaller, so that a step
            only decides the rounding, an error of step^2 / 12 for each number.
    """
    often = used[:, None] / used.sum().clamp_min(1)
    largest = scheme.largest_entry
    reaches = entries.abs().max().item() / largest or 1.0
    errors = {}
    for step in (reaches * part for part in STEPS):
        rounded = (entries / step).round().clamp(-largest, largest) * step
        errors[step] = float(((entries - rounded).square() * often).sum())
        errors[step] += unknown * scheme.vector_size * step**2 / 12
    return min(errors, key=lambda step: errors[step])


def fit_tile_band(rows: Tensor, fitter: RowFitter, seed: int) -> dict[str, Tensor]:
    """One codebook for each tile of a band of at most `scheme.tile[0]` rows.

    The scale of a row spans tiles, so it is fitted by least squares (or norm), not searched.

    Args:
        rows: rotated rows [n, in] float32.

    Returns:
        `codebook` fp16 [1, column tiles, entries, x], `codes`, `scale` of these rows.
    """
    scheme, step = fitter.scheme, 1.0
    groups = fitter.groups(rows)
    tiles = [
        tile.reshape(-1, scheme.vector_size)
        for tile in _unit(rows, fitter).split(scheme.tile[1], 1)
    ]
    learned = [kmeans(vectors, scheme.entries, seed=seed) for vectors in tiles]
    if scheme.largest_entry:
        used = [_used(book, vectors, scheme) for book, vectors in zip(learned, tiles, strict=True)]
        step = integer_step(torch.cat(learned), torch.cat(used), scheme)
    scale = (fitter.norm_scale(groups) * step).half()
    books, codes, decoded = [], [], []
    for entries, vectors in zip(learned, tiles, strict=True):
        books.append(as_stored(entries / step, scheme))
        assigner = Assigner(books[-1][None], scheme, learned=True)
        index = assigner.codes(vectors / step)
        codes.append(index.reshape(len(rows), -1))
        decoded.append(assigner.entries(index).reshape(len(rows), -1))
    scale = fitter.refit_scale(groups, torch.cat(decoded, 1).reshape(groups.shape), scale)
    packed = fitter.pack(torch.cat(codes, 1)[..., None], scale)
    return {"codebook": torch.stack(books)[None], **packed}


def as_stored(entries: Tensor, scheme: VQScheme) -> Tensor:
    """Entries in units of a step as a codebook keeps them: fp16, or integers as int8."""
    if not scheme.largest_entry:
        return entries.half()
    return entries.round().clamp(-scheme.largest_entry, scheme.largest_entry).char()


def _used(entries: Tensor, vectors: Tensor, scheme: VQScheme) -> Tensor:
    """How many of `vectors` [n, x] each of `entries` is nearest to."""
    codes = Assigner(entries[None], scheme, learned=True).codes(vectors)
    return torch.bincount(codes[:, 0], minlength=len(entries))


def _unit(rows: Tensor, fitter: RowFitter) -> Tensor:
    """`rows` over their scales as stored; zeros, where fp16 has none as small."""
    groups = fitter.groups(rows)
    scale = fitter.norm_scale(groups).float()
    return torch.where(scale == 0, 0, groups / scale).reshape(rows.shape)
