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
from ...formats.stored_weight import Pass, StoredWeight
from ...ops.codes import run_decode
from ...ops.linear import run_linear

BYTE = 8  # bits of a merged code

Split = dispatch.LinearProblem | dispatch.DecodeProblem


@functools.lru_cache(maxsize=1024)
def passes_of(scheme: VQScheme) -> tuple[VQScheme, ...]:
    """The schemes of one pass that together compute one of two."""
    found = [scheme.first_pass(), scheme.second_pass()]
    if scheme.stages == "nested":
        found = [replace(scheme.merged(), entry_bits=BYTE)]
    return tuple(VQScheme.parse(one.spec()) for one in found)  # the same objects as everywhere


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


def is_slow(problem: dispatch.LinearProblem) -> bool:
    """True if a pass is, or if codes are merged at every call."""
    nested = VQScheme.parse(problem.scheme).stages == "nested"
    return nested or any(dispatch.select(one).implementation.is_slow(one) for one in asked(problem))


def linear(x: Tensor, weight: StoredWeight, bias: Tensor | None) -> Tensor:
    """y = W x + b (`ops.reference.linear`); each of passes that add up is rounded to x's dtype."""
    *before, last = split(weight)
    y = run_linear(x, last, bias)
    return run_linear(x, before[0], None) + y if before else y


def decode(weight: StoredWeight) -> Tensor:
    """The stored rows, rotated back (`ops.reference.decode`): [..., length] float32."""
    first, *second = map(run_decode, split(weight))
    return first + second[0] if second else first


def split(weight: StoredWeight) -> list[StoredWeight]:
    """The weights of one pass that are computed for themselves and added."""
    first, second, scheme, length = weight
    if second is None:
        return [StoredWeight(first, None, VQScheme.parse(scheme.first_pass().spec()), length)]
    if scheme.stages == "nested":
        merged = merged_codes(first.codes, second.codes, scheme, length)
        missing = (1 << BYTE) - second.codebook.shape[1]
        table = second.codebook
        table = torch.nn.functional.pad(table, (0, 0, 0, missing)) if missing else table
        one = Pass(merged, table, first.scale, first.rotation)
        return [StoredWeight(one, None, passes_of(scheme)[0], length)]
    assert second.scale is not None
    rotation = second.rotation if scheme.stages == "rerotated" else first.rotation
    of_first, of_second = passes_of(scheme)
    residual = Pass(second.codes, second.codebook, second.scale, rotation)
    return [
        StoredWeight(first, None, of_first, length),
        StoredWeight(residual, None, of_second, length),
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


LINEAR = Implementation(linear, supports, note=note, is_slow=is_slow)
DECODE = Implementation(decode, supports, note=note)
