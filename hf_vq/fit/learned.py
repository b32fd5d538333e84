"""Codebooks learned from the weight itself, without data: per tensor (AQLM) or per tile (GPTVQ).

The weight is read in chunks of rows, as for universal codebooks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .assign import Assigner
from .kmeans import SAMPLES_PER_ENTRY, kmeans
from .rows import RowFitter

Rows = Callable[[int, int], Tensor]  # (first, last) -> rotated rows [n, in] float32


def tensor_codebook(rows: Rows, shape: torch.Size, fitter: RowFitter, seed: int) -> Tensor:
    """One codebook per residual stage, each learned on what the stages before it leave.

    Args:
        rows: reads rows of the weight.
        shape: (out, in) of the weight.

    Returns:
        fp16 [z, entries, x].
    """
    scheme = fitter.scheme
    vectors_per_row = shape[1] // scheme.vector_size
    wanted = -(-SAMPLES_PER_ENTRY * scheme.entries // vectors_per_row)  # rows that suffice
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(shape[0], generator=generator)[:wanted].tolist()
    sample = torch.cat([_unit(rows(row, row + 1), fitter) for row in sorted(chosen)])
    rest = sample.reshape(-1, scheme.vector_size)
    stages = []
    for stage in range(scheme.residuals):
        entries = kmeans(rest, scheme.entries, seed=seed + stage).half()
        stages.append(entries)
        one = Assigner(entries[None], scheme, learned=True)
        rest = rest - one.entries(one.codes(rest))
    return torch.stack(stages)


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
