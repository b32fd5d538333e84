"""`cpu.linear` and `cpu.decode`: weights as codes, computed on by libhf_vq_cpu.

Few tokens multiply with codes in the kernel. For many, and for codes that have no kernel, rows of
the weight are decoded, and PyTorch multiplies (`decoded`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ... import dispatch
from ...dispatch import Implementation
from ...formats.packing import unpack_bits
from ...formats.scheme import VQScheme
from ...formats.stored_weight import StoredWeight
from ...ops.library import linear_problem
from . import boxed_ops, decoded
from . import library as native
from .matrices import decodable, has_kernel, matrix, numbers_of, supports

# Up to here the kernel multiplies with codes, by instruction set.
FEW_TOKENS = {"zen4": 128, "avx512": 128}
_MOST_FEW_TOKENS = max(FEW_TOKENS.values())
FEW_TOKENS_ELSEWHERE = 16  # without an instruction for sums of 8-bit products, or of floats
FEW_TOKENS_WITH_TILES = 48  # bfloat16 on AMX: a decoded weight multiplies faster than codes

_TABLES = {(8, 8), (8, 12)}  # vectors of eight whose entries are rounded to 8 bits


def supports_decode(problem: dispatch.DecodeProblem) -> str | None:
    """None if the library decodes such rows, else the reason why not."""
    return decodable(VQScheme.parse(problem.scheme))


def linear(x: Tensor, weight: StoredWeight, bias: Tensor | None) -> Tensor:
    """y = W x + b (`ops.reference.linear`).

    The kernel rounds rotated inputs to 8 bits per scale group, and so the entries of the codebook;
    or, for one token of a large matrix of 8-vectors, their products (docs/cpu.md).
    A token with infinity or NaN gives NaN.
    """
    library = native.load()
    assert library is not None
    stored = matrix(weight)
    x, shape, scheme = x.contiguous(), x.shape, weight.scheme
    in_features, out_features = stored.in_features, stored.out
    tokens = x.numel() // in_features
    # Never a view: a model may add to it in place, which autograd forbids for views.
    y = x.new_empty((*shape[:-1], out_features))
    few = tokens <= FEW_TOKENS_ELSEWHERE or (
        tokens <= _MOST_FEW_TOKENS and tokens <= few_tokens(scheme, x.dtype)
    )
    if not (stored.has_kernel and few):
        rows = y.view(tokens, out_features)
        decoded.multiply(library, stored, x.view(tokens, in_features), bias, rows)
        return y
    dtype, address, bias_dtype = native.DTYPES[x.dtype], None, 0
    if bias is not None:
        bias = bias.expand(out_features)
        bias = bias.contiguous() if bias.dtype in native.DTYPES else bias.float()
        address, bias_dtype = bias.data_ptr(), native.DTYPES[bias.dtype]
    status = library.hf_vq_linear(
        ctypes.byref(stored), x.data_ptr(), dtype, tokens, address, bias_dtype, y.data_ptr()
    )
    if status != native.OK:
        native.check(status, "linear")
    return y


def bind(problem: dispatch.LinearProblem) -> dispatch.Bound | None:
    """`hf_vq::cpu_linear` for a problem of few tokens, if torch lets us register it."""
    op, scheme = boxed_ops.cpu_linear(), VQScheme.parse(problem.scheme)
    few = problem.tokens <= FEW_TOKENS_ELSEWHERE
    if (
        op is None
        or not few
        or scheme.two_passes
        or not has_kernel(scheme, problem.out_features, problem.in_features)
    ):
        return None
    numbers = torch.tensor(numbers_of(scheme, problem.in_features), dtype=torch.int32, device="cpu")
    none = torch.empty(0, device="cpu")

    def run(
        x: Tensor,
        codes: Tensor,
        codebook: Tensor,
        scale: Tensor,
        rotation: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor | None:
        turned = none if rotation is None else rotation
        added = none if bias is None else bias
        y: Tensor | None = op(x, codes, codebook, scale, turned, added, numbers)
        return y

    return run


def grouped(
    x: Tensor, weights: Sequence[StoredWeight], biases: Sequence[Tensor | None]
) -> list[Tensor]:
    """One after the other; what is saved is the way through torch's dispatcher."""
    found = []
    for weight, bias in zip(weights, biases, strict=True):
        problem = linear_problem("linear", x, weight.scheme.spec(), weight.out_features)
        bound = dispatch.bind(problem)
        y = None if bound is None else bound(x, *weight.first, bias)
        found.append(linear(x, weight, bias) if y is None else y)
    return found


def few_tokens(scheme: VQScheme, dtype: torch.dtype) -> int:
    """Up to how many tokens of a dtype the kernel multiplies with codes."""
    shape = scheme.vector_size, scheme.entry_bits
    if shape[0] % 8 == 0 and shape not in _TABLES and not scheme.lattice:
        return FEW_TOKENS_ELSEWHERE  # entries are multiplied as floats
    most = FEW_TOKENS.get(native.isa() or "", FEW_TOKENS_ELSEWHERE)
    if dtype == torch.bfloat16 and _multiplies_tiles() and not scheme.lattice:
        return min(most, FEW_TOKENS_WITH_TILES)
    return most


@lru_cache(maxsize=1)
def _multiplies_tiles() -> bool:
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())


def decode(weight: StoredWeight) -> Tensor:
    """The stored rows, rotated back (`ops.reference.decode`): [..., length] float32."""
    (codes, _, _, rotation), _, scheme, length = weight
    stored = matrix(weight)
    stored.signs = stored.diagonal = None
    count = stored.out
    rows = torch.empty((*codes.shape[:-1], length), dtype=torch.float32)
    stored.out, pointer, float32 = max(count, 1), ctypes.byref(stored), native.DTYPES[torch.float32]
    library = native.load()
    assert library is not None
    status = library.hf_vq_decode(pointer, 0, count, rows.data_ptr(), float32)
    if status != native.OK:
        native.check(status, "decode")
    if scheme.rotation != "none":  # a Hadamard transform is its own inverse
        status = library.hf_vq_rotate(
            pointer, rows.data_ptr(), float32, count, rows.data_ptr(), float32
        )
        if status != native.OK:
            native.check(status, "rotate")
    if rotation is not None:
        rows *= rotation if scheme.is_scaled else 1 - 2 * unpack_bits(rotation, 1, length)
    return rows


def note(problem: dispatch.LinearProblem) -> str | None:
    """What to say of codes that take longer than a dense weight."""
    scheme = VQScheme.parse(problem.scheme)
    if not has_kernel(scheme, problem.out_features, problem.in_features):
        return (
            f"{scheme.notation()} has no kernel that multiplies with codes: its rows are decoded "
            "at every call"
        )
    if _looks_up_slowly(scheme):
        return f"looking up {scheme.notation()} takes long without AVX-512 VBMI"
    if (scheme.vector_size, scheme.entry_bits) == (2, 8) and native.isa() not in FEW_TOKENS:
        return (
            f"without AVX-512 VBMI the 256 entries of {scheme.notation()} are read from the cache; "
            "16, as of turboquant-4, stay in registers and take less time"
        )
    return None


def is_slow(problem: dispatch.LinearProblem) -> bool:
    """True if no kernel multiplies with the codes, or one that takes longer than a dense weight."""
    scheme = VQScheme.parse(problem.scheme)
    multiplied = has_kernel(scheme, problem.out_features, problem.in_features)
    return not multiplied or _looks_up_slowly(scheme)


def _looks_up_slowly(scheme: VQScheme) -> bool:
    """Levels of 16 bits (linear_packed.h) in parts of 16 entries."""
    levels = scheme.vector_size == 1 and scheme.entry_bits + scheme.second_bits > 5
    return levels and native.isa() not in FEW_TOKENS


LINEAR = Implementation(linear, supports, bind, grouped=grouped, note=note, is_slow=is_slow)
DECODE = Implementation(decode, supports_decode)
