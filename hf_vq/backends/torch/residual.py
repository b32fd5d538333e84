"""The entries that run two passes by kernels of one: any device, any kernel.

    shared, rerotated    y = (W_1 x) + (W_2 x + b)         the table is asked for each pass
    nested               W x + b, W of codes that are merged: one byte for both codes of a weight

Merging reads all codes and writes a byte for each weight, at every call: little beside the product
of many tokens, much beside that of one. Kernels that look up both codes at once come before.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from ... import dispatch
from ...dispatch import Implementation
from ...formats.scheme import VQScheme

BYTE = 8  # bits of a merged code

Split = dispatch.LinearProblem | dispatch.DecodeProblem


@functools.lru_cache(maxsize=1024)
def passes_of(scheme: VQScheme) -> tuple[VQScheme, ...]:
    """The schemes of one pass that together compute one of two."""
    if scheme.stages == "nested":
        return (replace(scheme.merged(), entry_bits=BYTE),)
    return scheme.first_pass(), scheme.second_pass()


def asked(problem: Split) -> list[Split]:
    """What is asked of the table for each pass."""
    passes = passes_of(VQScheme.parse(problem.scheme))
    return [problem._replace(scheme=one.spec()) for one in passes]


def supports(problem: Split) -> str | None:
    """None if something better than the reference runs every pass, else the reason why not."""
    if not VQScheme.parse(problem.scheme).two_passes:
        return "it has one pass"
    if any(dispatch.select(one).name == "reference" for one in asked(problem)):
        return "only the reference runs one of its passes"
    return None


def note(problem: Split) -> str:
    """Who runs the passes."""
    names = " and ".join(dispatch.select(one).name for one in asked(problem))
    nested = VQScheme.parse(problem.scheme).stages == "nested"
    return f"codes are merged at every call for {names}" if nested else f"passes run by {names}"


def linear(
    x: Tensor,
    codes: Tensor,
    codebook: Tensor,
    scale: Tensor,
    rotation: Tensor | None,
    codes_2: Tensor | None,
    codebook_2: Tensor | None,
    scale_2: Tensor | None,
    rotation_2: Tensor | None,
    bias: Tensor | None,
    scheme: VQScheme,
) -> Tensor:
    """y = W x + b (`ops.reference.linear`); each of passes that add up is rounded to x's dtype."""
    given = (codes, codebook, scale, rotation, codes_2, codebook_2, scale_2, rotation_2)
    y: Tensor | None = None
    parts = _stored(*given, scheme, x.shape[-1])
    for index, (one, stored) in enumerate(parts):
        added = bias if index + 1 == len(parts) else None
        part = torch.ops.hf_vq.linear.default(x, *stored, *[None] * 4, added, one.spec())
        y = part if y is None else y + part
    assert y is not None
    return y


def decode(
    codes: Tensor,
    codebook: Tensor,
    scale: Tensor,
    rotation: Tensor | None,
    codes_2: Tensor | None,
    codebook_2: Tensor | None,
    scale_2: Tensor | None,
    rotation_2: Tensor | None,
    scheme: VQScheme,
    length: int,
) -> Tensor:
    """The stored rows, rotated back (`ops.reference.decode`): [..., length] float32."""
    given = (codes, codebook, scale, rotation, codes_2, codebook_2, scale_2, rotation_2)
    parts = _stored(*given, scheme, length)
    rows = [
        torch.ops.hf_vq.decode.default(*stored, *[None] * 4, one.spec(), length)
        for one, stored in parts
    ]
    total: Tensor = rows[0] if len(rows) == 1 else rows[0] + rows[1]
    return total


def _stored(
    codes: Tensor,
    codebook: Tensor,
    scale: Tensor,
    rotation: Tensor | None,
    codes_2: Tensor | None,
    codebook_2: Tensor | None,
    scale_2: Tensor | None,
    rotation_2: Tensor | None,
    scheme: VQScheme,
    length: int,
) -> list[tuple[VQScheme, tuple[Tensor | None, ...]]]:
    """Scheme and (codes, codebook, scale, rotation) of each pass that is computed for itself."""
    if codes_2 is None or codebook_2 is None:
        return [(scheme.first_pass(), (codes, codebook, scale, rotation))]
    if scheme.stages == "nested":
        merged = merged_codes(codes, codes_2, scheme, length)
        missing = (1 << BYTE) - codebook_2.shape[1]
        table = torch.nn.functional.pad(codebook_2, (0, 0, 0, missing)) if missing else codebook_2
        return [(passes_of(scheme)[0], (merged, table, scale, rotation))]
    second = rotation_2 if scheme.stages == "rerotated" else rotation
    first, last = passes_of(scheme)
    return [
        (first, (codes, codebook, scale, rotation)),
        (last, (codes_2, codebook_2, scale_2, second)),
    ]


def merged_codes(codes: Tensor, codes_2: Tensor, scheme: VQScheme, length: int) -> Tensor:
    """first << second_bits | second: uint8 [..., length]."""
    merged = _byte_codes(codes, scheme.entry_bits, length)
    merged <<= scheme.second_bits
    merged |= _byte_codes(codes_2, scheme.second_bits, length)
    return merged


def _byte_codes(codes: Tensor, bits: int, length: int) -> Tensor:
    """Packed codes of 1 to 4 bits as bytes: uint8 [..., length]. `unpack_bits` has 8 bytes each."""
    mask = (1 << bits) - 1
    if BYTE % bits:  # three bytes hold eight codes of 3 bits
        short = -codes.shape[-1] % bits
        groups = torch.nn.functional.pad(codes, (0, short)).unflatten(-1, (-1, bits)).int()
        words = sum(groups[..., i] << BYTE * i for i in range(bits))
        assert isinstance(words, Tensor)
        each = [(words >> bits * i & mask).to(torch.uint8) for i in range(BYTE)]
    else:
        each = [codes >> at & mask for at in range(0, BYTE, bits)]
    return torch.stack(each, -1).flatten(-2)[..., :length]


LINEAR = Implementation(linear, supports, note=note)
DECODE = Implementation(decode, supports, note=note)
