"""Codebooks learned from the weight itself, without data: per tensor (AQLM) or per tile (GPTVQ)."""

from __future__ import annotations

import torch
from torch import Tensor

from .assign import Assigner
from .kmeans import kmeans
from .rows import RowFitter


def fit_tensor_codebook(rows: Tensor, fitter: RowFitter, seed: int) -> dict[str, Tensor]:
    """One codebook per residual stage, each learned on what the stages before it leave.

    Args:
        rows: rotated weights [out, in] float32.

    Returns:
        `codebook` fp16 [z, entries, x], `codes`, `scale`.
    """
    scheme = fitter.scheme
    groups = fitter.groups(rows)
    unit = groups / fitter.norm_scale(groups).float().clamp_min(1e-30)
    rest = unit.reshape(-1, scheme.vector_size)
    stages = []
    for stage in range(scheme.residuals):
        entries = kmeans(rest, scheme.entries, seed=seed + stage).half()
        stages.append(entries)
        one = Assigner(entries[None], scheme, grid=False)
        rest = rest - one.entries(one.codes(rest))
    codebook = torch.stack(stages)
    fitted = fitter.fit(rows, Assigner(codebook, scheme, grid=False))
    return {"codebook": codebook, **fitted}


def fit_tile_codebooks(rows: Tensor, fitter: RowFitter, seed: int) -> dict[str, Tensor]:
    """One codebook for each tile of `scheme.tile` rows x columns; tiles at the edge are smaller.

    Args:
        rows: rotated weights [out, in] float32.

    Returns:
        `codebook` fp16 [row tiles, column tiles, entries, x], `codes`, `scale`.
    """
    scheme = fitter.scheme
    groups = fitter.groups(rows)
    scale = fitter.norm_scale(groups)
    unit = (groups / scale.float().clamp_min(1e-30)).reshape(rows.shape)
    books, codes, chosen = [], [], []
    for band in unit.split(scheme.tile[0], 0):
        fitted = [_fit_tile(tile, fitter, seed) for tile in band.split(scheme.tile[1], 1)]
        books.append(torch.stack([entries for entries, _, _ in fitted]))
        codes.append(torch.cat([index for _, index, _ in fitted], 1))
        chosen.append(torch.cat([decoded for _, _, decoded in fitted], 1))
    scale = fitter.refit_scale(groups, torch.cat(chosen).reshape(groups.shape), scale)
    packed = fitter.pack(torch.cat(codes)[..., None], scale)
    return {"codebook": torch.stack(books), **packed}


def _fit_tile(tile: Tensor, fitter: RowFitter, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Entries [entries, x] fp16, codes [rows, vectors] and decoded tile of one tile."""
    vectors = tile.reshape(-1, fitter.scheme.vector_size)
    entries = kmeans(vectors, fitter.scheme.entries, seed=seed).half()
    assigner = Assigner(entries[None], fitter.scheme, grid=False)
    codes = assigner.codes(vectors)
    return entries, codes.reshape(len(tile), -1), assigner.entries(codes).reshape(tile.shape)
