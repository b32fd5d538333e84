"""Scales and codes of rotated rows under a given codebook."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import Implementation
from ..errors import VQFormatError
from ..formats.packing import pack_bits
from ..formats.scheme import VQScheme
from ..ops import encode_weight
from .assign import Assigner
from .ldlq import Feedback, ldlq_rows
from .scale import FACTORS, SCALAR_FACTORS, least_squares, root_mean_square, search_scale

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
        """`rows` [n, in] as [n * groups, group size]."""
        return rows.reshape(-1, self.group)

    def norm_scale(self, groups: Tensor) -> Tensor:
        """The root mean square of each group, as stored: fp16 [n * groups, 1]."""
        return root_mean_square(groups).half()

    def refit_scale(self, groups: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
        """The least-squares scale of the chosen entries, as stored; unchanged for `norm`."""
        return scale if self.search == "norm" else _refitted(groups, chosen, scale)

    def fit(
        self,
        rows: Tensor,
        codebook: Tensor,
        step: float = 1.0,
        feedback: Feedback | None = None,
    ) -> dict[str, Tensor]:
        """Stored `codes` [n, bytes] and `scale` [n, groups] of float32 `rows` [n, in].

        Args:
            step: what 1 in the codebook is for rows whose root mean square is 1.
            feedback: what calibration says of the inputs of these rows.
        """
        if feedback is not None:
            search, refit = self.search == "search", self.search != "norm"
            found = ldlq_rows(rows, codebook, self.scheme, feedback, search=search, refit=refit)
            return self.pack(*found)
        searched = SCALAR_FACTORS if self.scheme.vector_size == 1 else FACTORS
        tried = searched if self.search == "search" else (1.0,)
        factors = tuple(step * factor for factor in tried)
        refit = self.search != "norm"
        codes, scale = encode_weight(rows, codebook, self.scheme, factors, refit)
        return {"codes": codes, "scale": scale}

    def pack(self, codes: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """Stored tensors of `codes` [n, vectors, z] and `scale` [n * groups, 1]."""
        packed = _packed(codes, self.scheme)
        return {"codes": packed, "scale": scale.reshape(len(codes), -1)}

    def check(self, weight: Tensor, scale: Tensor) -> None:
        """Raise VQFormatError unless every stored scale of a weight is finite: a group that is not,
        or that is too large for fp16, has a scale that is not."""
        if bool(scale.isfinite().all()):
            return
        if not bool(weight.isfinite().all()):
            raise VQFormatError(
                f"{self.where} holds NaN or infinity, so it cannot be quantized. Check the "
                "checkpoint, or add the module to VQConfig(modules_to_not_convert=[...])."
            )
        raise VQFormatError(
            f"{self.where} has weights too large for fp16 scales. "
            "Add the module to VQConfig(modules_to_not_convert=[...])."
        )


def encode_rows(
    rows: Tensor, codebook: Tensor, scheme: VQScheme, factors: tuple[float, ...], refit: bool
) -> tuple[Tensor, Tensor]:
    """The specification of `ops.encode_weight`."""
    assigner = Assigner(codebook, scheme, learned=scheme.codebook != "universal")
    groups = rows.reshape(-1, scheme.group(rows.shape[-1]))
    if len(factors) > 1:
        scale = search_scale(groups, assigner, factors).half()
    else:
        scale = (root_mean_square(groups) * factors[0]).half()
    codes, chosen = _assigned(groups, scale, assigner)
    if refit:
        # Assign once more with the least-squares scale as it will be stored.
        scale = _refitted(groups, chosen, scale)
        codes, chosen = _assigned(groups, scale, assigner)
        scale = _refitted(groups, chosen, scale)
    packed = _packed(codes.reshape(len(rows), -1, codes.shape[-1]), scheme)
    return packed, scale.reshape(len(rows), -1)


def _assigned(groups: Tensor, scale: Tensor, assigner: Assigner) -> tuple[Tensor, Tensor]:
    unit = groups / scale.float().clamp_min(1e-30)
    codes = assigner.codes(unit.reshape(-1, assigner.vector_size))
    return codes, assigner.entries(codes).reshape(groups.shape)


def _refitted(groups: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """The least-squares scale as stored; one that is not finite stays so."""
    fitted = least_squares(groups, chosen, scale.float()).half()
    return torch.where(scale.isfinite(), fitted, scale)


def _packed(codes: Tensor, scheme: VQScheme) -> Tensor:
    """Codes [n, vectors, z] as stored: uint8 [n, bytes]."""
    streams = [pack_bits(stream, scheme.entry_bits, check=False) for stream in codes.unbind(-1)]
    return torch.cat(streams, 1)


ENCODE = Implementation(encode_rows)
