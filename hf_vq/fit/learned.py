"""Codebooks learned from the weight itself, without data: per tensor (AQLM) or per tile (GPTVQ).

The weight is read in chunks of rows, as for universal codebooks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..formats.scheme import VQScheme
from .assign import Assigner
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
        if scheme.largest_entry:
            if stage == 0:
                step = _step(entries, rest, scheme)
                entries, rest = entries / step, rest / step
            entries = entries.round().clamp(-scheme.largest_entry, scheme.largest_entry).char()
        else:
            entries = entries.half()
        stages.append(entries)
        one = Assigner(entries[None], scheme, learned=True)
        rest = rest - one.entries(one.codes(rest))
    return torch.stack(stages), step


def _step(entries: Tensor, vectors: Tensor, scheme: VQScheme) -> float:
    """The step with the least error of rounding `entries` [n, x] of the first stage, each counted
    as often as `vectors` have it.

    What the largest integer does not reach is cut off; of the other stages, whose entries are
    smaller, a step only decides the rounding, an error of step^2 / 12 for each number.
    """
    used = Assigner(entries[None], scheme, learned=True).codes(vectors)[:, 0]
    often = torch.bincount(used, minlength=len(entries))[:, None] / len(vectors)
    largest = scheme.largest_entry
    reaches = entries.abs().max().item() / largest or 1.0
    errors = {}
    for step in (reaches * part for part in STEPS):
        rounded = (entries / step).round().clamp(-largest, largest) * step
        errors[step] = float(((entries - rounded).square() * often).sum())
        errors[step] += (scheme.residuals - 1) * scheme.vector_size * step**2 / 12
    return min(errors, key=lambda step: errors[step])


def fit_tile_band(rows: Tensor, fitter: RowFitter, seed: int) -> dict[str, Tensor]:
    """One codebook for each tile of a band of at most `scheme.tile[0]` rows.

    The scale of a row spans tiles, so it is fitted by least squares (or norm), not searched.

    Args:
        rows: rotated rows [n, in] float32.

    Returns:
        `codebook` fp16 [1, column tiles, entries, x], `codes`, `scale` of these rows.
    """
    scheme = fitter.scheme
    groups = fitter.groups(rows)
    scale = fitter.norm_scale(groups)
    books, codes, decoded = [], [], []
    for tile in _unit(rows, fitter).split(scheme.tile[1], 1):
        vectors = tile.reshape(-1, scheme.vector_size)
        entries = kmeans(vectors, scheme.entries, seed=seed).half()
        assigner = Assigner(entries[None], scheme, learned=True)
        index = assigner.codes(vectors)
        books.append(entries)
        codes.append(index.reshape(len(tile), -1))
        decoded.append(assigner.entries(index).reshape(tile.shape))
    scale = fitter.refit_scale(groups, torch.cat(decoded, 1).reshape(groups.shape), scale)
    packed = fitter.pack(torch.cat(codes, 1)[..., None], scale)
    return {"codebook": torch.stack(books)[None], **packed}


def _unit(rows: Tensor, fitter: RowFitter) -> Tensor:
    """`rows` over their scales as stored."""
    groups = fitter.groups(rows)
    return (groups / fitter.norm_scale(groups).float().clamp_min(1e-30)).reshape(rows.shape)
