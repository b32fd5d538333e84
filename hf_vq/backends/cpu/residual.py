"""`cpu.nested_linear`: a few tokens and nested passes of 4 + 4 bits, by libhf_vq_cpu.

`linear_nested.h` looks up both codes of a weight at once, in one table of 16 bits.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...dispatch import Implementation, LinearProblem
from ...formats.scheme import VQScheme
from ...formats.stored_weight import StoredWeight
from .. import refusals
from ..torch import residual as two_passes
from . import library as native
from .matrices import Matrix, matrix

FEW_TOKENS = 64  # codes are read once for each: merging them costs about as much as 100 tokens
BITS = 4  # of both codes


def supports(problem: LinearProblem) -> str | None:
    """None if the library multiplies with both codes at once, else the reason why not."""
    scheme = VQScheme.parse(problem.scheme)
    if scheme.stages != "nested" or (scheme.entry_bits, scheme.second_bits) != (BITS, BITS):
        return f"not nested passes of {BITS} + {BITS} bits"
    reason = refusals.dtype(problem.dtype, refusals.FLOATS)
    if reason is None and problem.tokens > FEW_TOKENS:
        return f"more than {FEW_TOKENS} tokens"
    reason = reason or refusals.qr(scheme)
    if reason:
        return reason
    library, stored = native.load(), _first(scheme, problem.out_features, problem.in_features)
    if library is None or library.hf_vq_nested_supports(ctypes.byref(stored)) != native.OK:
        return "rows or scale groups are no multiples of 128"
    return None


def _first(scheme: VQScheme, out_features: int, in_features: int, *addresses: int | None) -> Matrix:
    return matrix(scheme.first_pass(), out_features, in_features, *addresses)


def linear(x: Tensor, weight: StoredWeight, bias: Tensor | None) -> Tensor:
    """y = W x + b (`ops.reference.linear`). The kernel rounds rotated inputs to 8 bits per 128, and
    the entries of the codebook to 16; without the second codes the first pass is asked for."""
    (codes, _, scale, rotation), second, scheme, in_features = weight
    if second is None:
        return two_passes.linear(x, weight, bias)
    library = native.load()
    assert library is not None
    out_features = codes.shape[0]
    x, codes, codes_2 = x.contiguous(), codes.contiguous(), second.codes.contiguous()
    table, scale = second.codebook.half().contiguous(), scale.half().contiguous()
    if rotation is not None:
        rotation = rotation.to(torch.float16 if scheme.is_scaled else torch.uint8).contiguous()
    stored = _first(
        scheme, out_features, in_features, codes.data_ptr(), table.data_ptr(), scale.data_ptr(),
        None if rotation is None else rotation.data_ptr(),
    )  # fmt: skip
    address, bias_dtype = None, 0
    if bias is not None:
        bias = bias.expand(out_features)
        bias = bias.contiguous() if bias.dtype in native.DTYPES else bias.float()
        address, bias_dtype = bias.data_ptr(), native.DTYPES[bias.dtype]
    y = torch.empty((*x.shape[:-1], out_features), dtype=x.dtype)
    status = library.hf_vq_nested_linear(
        ctypes.byref(stored), codes_2.data_ptr(), x.data_ptr(), native.DTYPES[x.dtype],
        x.numel() // in_features, address, bias_dtype, y.data_ptr(),
    )  # fmt: skip
    native.check(status, "nested_linear")
    return y


LINEAR = Implementation(linear, supports)
