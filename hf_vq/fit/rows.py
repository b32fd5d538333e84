"""Scales and codes of rotated rows under a given codebook."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import Tensor

from ..errors import VQFormatError
from ..formats.scheme import VQScheme
from ..ops import encode_weight
from ..ops.reference.encode_weight import (
    FACTORS,
    SCALAR_FACTORS,
    packed,
    refitted,
    root_mean_square,
)
from .block_ldlq import BlockFeedback, ldlq_blocks
from .ldlq import Feedback, ldlq_rows

SEARCHES = ("search", "least_squares", "norm")


def not_finite(where: str) -> VQFormatError:
    """The error of a weight with numbers that are not finite."""
    return VQFormatError(
        f"{where} holds NaN or infinity, so it cannot be quantized. Check the checkpoint, or add "
        "the module to VQConfig(modules_to_not_convert=[...])."
    )


class RowFitter:
    """Fits rows of `in_features` weights; one fp16 scale per group of a row.

    Args:
        search: `search`, `least_squares` or `norm`.
        where: name of the weight for errors.
    """

    def __init__(self, scheme: VQScheme, in_features: int, search: str, where: str) -> None:
        self.scheme, self.search, self.where = scheme, search, where
        self.in_features = in_features

    @cached_property
    def group(self) -> int:
        """Weights that share a scale."""
        return self.scheme.group(self.in_features, self.where)

    def groups(self, rows: Tensor) -> Tensor:
        """`rows` [n, in] as [n * groups, group size]."""
        return rows.reshape(-1, self.group)

    def norm_scale(self, groups: Tensor) -> Tensor:
        """The root mean square of each group, as stored: fp16 [n * groups, 1]."""
        return root_mean_square(groups).half()

    def refit_scale(self, groups: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
        """The least-squares scale of the chosen entries, as stored; unchanged for `norm`."""
        return scale if self.search == "norm" else refitted(groups, chosen, scale)

    def fit(
        self,
        rows: Tensor,
        codebook: Tensor,
        step: float = 1.0,
        feedback: Feedback | BlockFeedback | None = None,
    ) -> dict[str, Tensor]:
        """Stored `codes` [n, bytes] and `scale` [n, groups] of float32 `rows` [n, in].

        Args:
            step: what 1 in the codebook is for rows whose root mean square is 1.
            feedback: what calibration says of the inputs of these rows.
        """
        refit = self.search != "norm"
        if isinstance(feedback, Feedback):
            search = self.search == "search"
            found = ldlq_rows(rows, codebook, self.scheme, feedback, search=search, refit=refit)
            return self.pack(*found)
        searched = SCALAR_FACTORS if self.scheme.vector_size == 1 else FACTORS
        tried = searched if self.search == "search" else (1.0,)
        factors = tuple(step * factor for factor in tried)
        if feedback is not None:
            options: dict[str, Any] = {"factors": factors, "refit": refit}
            return self.pack(*ldlq_blocks(rows, codebook, self.scheme, feedback, **options))
        codes, scale = encode_weight(rows, codebook, self.scheme, factors, refit)
        return {"codes": codes, "scale": scale}

    def pack(self, codes: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """Stored tensors of `codes` [n, vectors, z] and `scale` [n * groups, 1]."""
        return {"codes": packed(codes, self.scheme), "scale": scale.reshape(len(codes), -1)}

    def check(self, weight: Tensor, scale: Tensor) -> None:
        """Raise VQFormatError unless every stored scale of a weight is finite: a group that is not,
        or that is too large for fp16, has a scale that is not."""
        if bool(scale.isfinite().all()):
            return
        if not bool(weight.isfinite().all()):
            raise not_finite(self.where)
        raise VQFormatError(
            f"{self.where} has weights too large for fp16 scales. "
            "Add the module to VQConfig(modules_to_not_convert=[...])."
        )
