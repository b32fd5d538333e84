"""The second pass of `nested` and `rerotated` schemes (TurboQuant: residual pass)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..formats.packing import pack_bits, unpack_bits
from ..formats.scheme import VQScheme


def nested_codes(
    rows: Tensor, codes: Tensor, scale: Tensor, codebook_2: Tensor, scheme: VQScheme
) -> Tensor:
    """Codes of the second pass, which refine the cell that the first pass chose.

    Args:
        rows: rotated weights [n, in] float32.
        codes: uint8 [n, bytes] of the first pass.
        scale: fp16 [n, groups] of the first pass.
        codebook_2: [1, 2^(2y), 1], indexed by (first code << y) | second code.

    Returns:
        uint8 [n, bytes].
    """
    bits = scheme.entry_bits
    table = codebook_2[0].float().reshape(scheme.entries, scheme.entries)
    unit = rows.unflatten(-1, (scale.shape[-1], -1)) / scale.float().clamp_min(1e-30)[..., None]
    unit = unit.flatten(-2)
    first = unpack_bits(codes, bits, rows.shape[-1])
    best = torch.full_like(unit, torch.inf)
    second = torch.zeros_like(first)
    for code in range(scheme.entries):
        distance = (unit - table[:, code][first]).abs()
        closer = distance < best
        best, second = torch.where(closer, distance, best), torch.where(closer, code, second)
    return pack_bits(second, bits, check=False)


def one_pass(scheme: VQScheme) -> VQScheme:
    """The scheme of the first pass alone."""
    return replace(scheme, residuals=1, stages="independent")
