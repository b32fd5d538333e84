"""Two nested passes (TurboQuant's residual pass, with one rotation and one scale) as one code."""

from __future__ import annotations

from torch import Tensor

from ..formats.packing import pack_bits, unpack_bits
from ..formats.scheme import VQScheme


def split_codes(merged: dict[str, Tensor], scheme: VQScheme, in_features: int) -> dict[str, Tensor]:
    """`codes` of `scheme.merged()`, uint8 [n, bytes], as `codes` and `codes_2` of nested stages."""
    bits = scheme.second_bits
    codes = unpack_bits(merged["codes"], scheme.entry_bits + bits, in_features)
    first, second = codes >> bits, codes & (1 << bits) - 1
    packed = pack_bits(first, scheme.entry_bits), pack_bits(second, bits)
    return {**merged, "codes": packed[0], "codes_2": packed[1]}
