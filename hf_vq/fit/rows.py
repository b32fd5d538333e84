"""Scales and codes of rotated rows under a given codebook."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import VQFormatError
from ..formats.packing import pack_bits
from ..formats.scheme import VQScheme
from .assign import Assigner
from .scale import least_squares, root_mean_square, search_scale

SEARCHES = ("search", "least_squares", "norm")


class RowFitter:
    """Fits rows of `in_features` weights; one fp16 scale per group of a row.

    Args:
        search: `search`, `least_squares` or `norm`.
        where: name of the weight for errors.
    """

    def __init__(self, scheme: VQScheme, in_features: int, search: str, where: str) -> None:
        self.scheme, self.search, self.where = scheme, search, where
        self.group = scheme.group(in_features, where)

    def groups(self, rows: Tensor) -> Tensor:
        """`rows` [n, in] as [n * groups, group size]; they must be finite."""
        if not bool(rows.isfinite().all()):
            raise VQFormatError(
                f"{self.where} holds NaN or infinity, so it cannot be quantized. Check the "
                "checkpoint, or add the module to VQConfig(modules_to_not_convert=[...])."
            )
        return rows.reshape(-1, self.group)

    def norm_scale(self, groups: Tensor) -> Tensor:
        """The root mean square of each group, as stored: fp16 [n * groups, 1]."""
        return self._store(root_mean_square(groups))

    def refit_scale(self, groups: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
        """The least-squares scale of the chosen entries, as stored; unchanged for `norm`."""
        if self.search == "norm":
            return scale
        return self._store(least_squares(groups, chosen, scale.float()))

    def fit(self, rows: Tensor, assigner: Assigner) -> dict[str, Tensor]:
        """Stored `codes` [n, bytes] and `scale` [n, groups] of float32 `rows` [n, in]."""
        groups = self.groups(rows)
        if self.search == "search":
            scale = self._store(search_scale(groups, assigner, self.scheme.vector_size))
        else:
            scale = self.norm_scale(groups)
        codes, chosen = self._assign(groups, scale, assigner)
        if self.search != "norm":
            # Assign once more with the least-squares scale as it will be stored.
            scale = self.refit_scale(groups, chosen, scale)
            codes, chosen = self._assign(groups, scale, assigner)
            scale = self.refit_scale(groups, chosen, scale)
        return self.pack(codes.reshape(len(rows), -1, codes.shape[-1]), scale)

    def pack(self, codes: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """Stored tensors of `codes` [n, vectors, z] and `scale` [n * groups, 1]."""
        streams = [pack_bits(stream, self.scheme.entry_bits) for stream in codes.unbind(-1)]
        return {"codes": torch.cat(streams, 1), "scale": scale.reshape(len(codes), -1)}

    def _assign(self, groups: Tensor, scale: Tensor, assigner: Assigner) -> tuple[Tensor, Tensor]:
        unit = groups / scale.float().clamp_min(1e-30)
        codes = assigner.codes(unit.reshape(-1, self.scheme.vector_size))
        return codes, assigner.entries(codes).reshape(groups.shape)

    def _store(self, scale: Tensor) -> Tensor:
        stored = scale.half()
        if not bool(stored.isfinite().all()):
            raise VQFormatError(
                f"{self.where} has weights too large for fp16 scales. "
                "Add the module to VQConfig(modules_to_not_convert=[...])."
            )
        return stored
