"""Rows of integers, for embeddings: rows are looked up, never multiplied.

    int8   [H codes -127 .. 127 | scale]                            w = scale * code
    int4   [H / 2 bytes of codes | H / 32 scales | H / 32 minima]    w = minimum + scale * code

A row is one stretch of bytes, scales and minima in fp16, so looking rows up reads nothing else, and
no tensor has the shape of the dense one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import VQFormatError, VQSchemeError
from .packing import pack_bits, unpack_bits

KINDS = ("int8", "int4")
GROUP = 32  # weights of int4 that share a scale and a minimum
_LARGEST = {"int8": 127, "int4": 15}


def row_bytes(kind: str, features: int, where: str = "the embedding") -> int:
    """Bytes of a row of `features` numbers.

    Raises:
        VQSchemeError: the row cannot be stored.
    """
    if kind == "int8":
        return features + 2
    if features % GROUP:
        raise VQSchemeError(
            f"int4 needs rows divisible by {GROUP}; {where} has {features}. Use embeddings='int8'."
        )
    return features // 2 + 4 * (features // GROUP)


def encode_rows(weight: Tensor, kind: str, where: str = "the embedding") -> Tensor:
    """Bytes uint8 [n, row_bytes] of rows [n, features] of any float dtype.

    Codes are the nearest ones under the rounded scale and minimum.

    Raises:
        VQFormatError: a number is not finite, or beyond fp16.
        VQSchemeError: the rows cannot be stored.
    """
    features = weight.shape[-1]
    row_bytes(kind, features, where)
    rows, most = weight.float(), _LARGEST[kind]
    if kind == "int8":
        groups, low = rows[:, None], torch.zeros_like(rows[:, :1])
        scale = (rows.abs().amax(-1, keepdim=True) / most).half()
    else:
        groups = rows.unflatten(-1, (-1, GROUP))
        low = groups.amin(-1).half().float()
        scale = ((groups.amax(-1) - low) / most).clamp_min(0).half()
    if not bool(scale.isfinite().all() and low.isfinite().all()):
        raise VQFormatError(
            f"{where} holds NaN, infinity or numbers beyond fp16, so it cannot be quantized. Leave "
            "embeddings out."
        )
    step = scale.float().clamp_min(1e-30)[..., None]
    codes = ((groups - low[..., None]) / step).round().flatten(-2)
    if kind == "int8":
        stored = codes.clamp(-most, most).to(torch.int8).view(torch.uint8)
        return torch.cat([stored, _bytes(scale)], -1)
    packed = pack_bits(codes.clamp(0, most).long(), 4)
    return torch.cat([packed, _bytes(scale), _bytes(low.half())], -1)


def decode_rows(stored: Tensor, kind: str, features: int) -> Tensor:
    """Rows [..., features] float32 of bytes [..., row_bytes]."""
    if kind == "int8":
        codes = stored[..., :features].contiguous().view(torch.int8).float()
        return codes * _halves(stored[..., features:])
    codes = unpack_bits(stored[..., : features // 2].contiguous(), 4, features).float()
    scale, low = _halves(stored[..., features // 2 :]).chunk(2, -1)
    grouped = codes.unflatten(-1, (-1, GROUP)) * scale[..., None] + low[..., None]
    return grouped.flatten(-2)


def _bytes(numbers: Tensor) -> Tensor:
    return numbers.half().contiguous().view(torch.uint8)


def _halves(stored: Tensor) -> Tensor:
    return stored.contiguous().view(torch.float16).float()
