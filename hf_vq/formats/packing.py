"""Bits <-> bytes: codes of 1..16 bits as one dense little-endian stream per row.

Eight codes of `bits` bits fill exactly `bits` bytes, whatever the width:

    bits = 3    byte 0 = c2[1:0] c1 c0    byte 1 = c5[0] c4 c3 c2[2]    byte 2 = c7 c6 c5[2:1]
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import VQFormatError


def packed_size(count: int, bits: int) -> int:
    """Bytes of `count` codes of `bits` bits."""
    return (count * bits + 7) // 8


def pack_bits(codes: Tensor, bits: int, *, check: bool = True) -> Tensor:
    """Pack integer `codes` [..., n] in [0, 2**bits) into uint8 [..., ceil(n * bits / 8)].

    Args:
        check: raise for codes that do not fit; on a GPU this synchronizes.

    Raises:
        VQFormatError: `bits` is not in 1..16, or a code does not fit.
    """
    _check_bits(bits)
    if check and codes.numel() and (int(codes.min()) < 0 or int(codes.max()) >= 1 << bits):
        raise VQFormatError(f"codes must be in [0, {1 << bits}) to be packed to {bits} bits.")
    n = codes.shape[-1]
    if bits == 8:
        return codes.to(torch.uint8)
    if bits == 16:
        return torch.stack([codes & 255, codes >> 8], -1).to(torch.uint8).flatten(-2)
    eights = torch.nn.functional.pad(codes.to(torch.int32), (0, -n % 8)).unflatten(-1, (-1, 8))
    stream = torch.zeros(*eights.shape[:-1], bits + 2, dtype=torch.int32, device=codes.device)
    for j in range(8):
        byte, shift = divmod(j * bits, 8)
        shifted = eights[..., j] << shift
        for k in range(3):
            stream[..., byte + k] |= (shifted >> (8 * k)) & 255
    packed = stream[..., :bits].to(torch.uint8).flatten(-2)
    return packed[..., : packed_size(n, bits)].contiguous()


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """The exact inverse of `pack_bits`: uint8 [..., bytes] -> int32 codes [..., count].

    Raises:
        VQFormatError: `bits` is not in 1..16, or the bytes are not those of `count` codes.
    """
    _check_bits(bits)
    if packed.dtype != torch.uint8 or packed.shape[-1] != packed_size(count, bits):
        raise VQFormatError(
            f"{count} codes of {bits} bits are {packed_size(count, bits)} bytes of uint8; "
            f"got {packed.shape[-1]} of {packed.dtype}."
        )
    if bits == 8:
        return packed.to(torch.int32)
    if bits == 16:
        pairs = packed.to(torch.int32).unflatten(-1, (-1, 2))
        return pairs[..., 0] | (pairs[..., 1] << 8)
    padded = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % bits))
    stream = padded.to(torch.int32).unflatten(-1, (-1, bits))
    codes = []
    for j in range(8):
        byte, shift = divmod(j * bits, 8)
        word = stream[..., byte]
        for k in range(1, (shift + bits + 7) // 8):
            word = word | (stream[..., byte + k] << (8 * k))
        codes.append((word >> shift) & ((1 << bits) - 1))
    return torch.stack(codes, -1).flatten(-2)[..., :count]


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= 16:
        raise VQFormatError(f"codes are packed to 1..16 bits; got {bits}.")
