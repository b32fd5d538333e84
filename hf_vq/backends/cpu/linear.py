"""`cpu.linear` and `cpu.decode`: weights as codes, computed on by libhf_vq_cpu.

Few tokens multiply with codes in the kernel. For many, and for codes that have no kernel, the
weight is decoded, some rows at a time so that they stay in the cache, and PyTorch multiplies.
"""

from __future__ import annotations

import ctypes
import math
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
from .. import refusals
from . import boxed_ops
from . import library as native

# Up to here the kernel multiplies with codes, by instruction set.
FEW_TOKENS = {"zen4": 128, "avx512": 128}
FEW_TOKENS_ELSEWHERE = 16  # without an instruction for sums of 8-bit products, or of floats
DECODED_ROWS = 256  # output features at a time

_HALF = torch.float16
_TABLES = {(8, 8), (8, 12)}  # vectors of eight whose entries are rounded to 8 bits
_SHARED, _TILE, _E8P = range(3)  # enum hf_vq_scope


class Matrix(ctypes.Structure):
    """struct hf_vq_matrix of api.h."""

    _fields_ = [
        ("codes", ctypes.c_void_p),
        ("codebook", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("signs", ctypes.c_void_p),
        ("diagonal", ctypes.c_void_p),
        ("out", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("x", ctypes.c_int32),
        ("bits", ctypes.c_int32),
        ("stages", ctypes.c_int32),
        ("scope", ctypes.c_int32),
        ("tile_rows", ctypes.c_int32),
        ("tile_columns", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("block", ctypes.c_int32),
    ]
    has_kernel: bool  # whether hf_vq_linear multiplies with it; hf_vq_decode decodes any


def matrix(
    scheme: VQScheme,
    out_features: int,
    in_features: int,
    codes: int | None = None,
    codebook: int | None = None,
    scale: int | None = None,
    rotation: int | None = None,
) -> Matrix:
    """The description of a matrix whose tensors lie at these addresses."""
    numbers, has_kernel = _shape(scheme.key, out_features, in_features)
    turned = (None, rotation) if scheme.is_scaled else (rotation, None)
    described = Matrix(codes, codebook, scale, *turned, out_features, in_features, *numbers)
    described.has_kernel = has_kernel
    return described


@lru_cache(maxsize=1024)
def _shape(spec: str, out_features: int, in_features: int) -> tuple[tuple[int, ...], bool]:
    """What all matrices of a shape share: numbers of `hf_vq_matrix`, and whether a kernel
    multiplies with them. Nothing here is of a single tensor, so it does not outlive models."""
    numbers = _numbers(VQScheme.parse(spec), in_features)
    described = Matrix(None, None, None, None, None, out_features, in_features, *numbers)
    library = native.load()
    return numbers, bool(
        library and library.hf_vq_linear_supports(ctypes.byref(described)) == native.OK
    )


def _numbers(scheme: VQScheme, in_features: int) -> tuple[int, ...]:
    """The last fields of `hf_vq_matrix`."""
    scope = _E8P if scheme.lattice else _TILE if scheme.codebook == "tile" else _SHARED
    return (
        scheme.vector_size, scheme.entry_bits, scheme.streams, scope, *scheme.tile,
        scheme.group(in_features), scheme.block(in_features),
    )  # fmt: skip


def supports(problem: dispatch.LinearProblem) -> str | None:
    """None if the library multiplies with such a matrix, else the reason why not."""
    reason = refusals.dtype(problem.dtype, refusals.FLOATS)
    return reason or _decodable(VQScheme.parse(problem.scheme))


def supports_decode(problem: dispatch.DecodeProblem) -> str | None:
    """None if the library decodes such rows, else the reason why not."""
    return _decodable(VQScheme.parse(problem.scheme))


def _decodable(scheme: VQScheme) -> str | None:
    if scheme.stages != "independent":
        return f"{scheme.stages} stages have a second pass"
    reason = refusals.mode(scheme) or refusals.qr(scheme) or refusals.zero(scheme)
    if reason is None and scheme.codebook == "channel_group":
        return "it has codebooks per channel group"
    return reason


def linear(x: Tensor, weight: StoredWeight, bias: Tensor | None) -> Tensor:
    """y = W x + b (`ops.reference.linear`).

    The kernel rounds rotated inputs to 8 bits per scale group, and so the entries of the codebook;
    or, for one token of a large matrix of 8-vectors, their products (docs/cpu.md).
    A token with infinity or NaN gives NaN.
    """
    library = native.load()
    assert library is not None
    (codes, codebook, scale, rotation), _, scheme, in_features = weight
    turned_by = _HALF if scheme.is_scaled else torch.uint8
    shape, out_features = x.shape, codes.shape[0]
    tokens = x.numel() // in_features
    if not (
        x.is_contiguous() and codes.is_contiguous()
        and codebook.is_contiguous() and codebook.dtype is _HALF
        and scale.is_contiguous() and scale.dtype is _HALF
        and (rotation is None or (rotation.is_contiguous() and rotation.dtype is turned_by))
    ):  # fmt: skip
        x, codes = x.contiguous(), codes.contiguous()
        codebook, scale = _half(codebook), _half(scale)
        rotation = None if rotation is None else rotation.to(turned_by).contiguous()
    stored = matrix(
        scheme, out_features, in_features, codes.data_ptr(), codebook.data_ptr(),
        scale.data_ptr(), None if rotation is None else rotation.data_ptr(),
    )  # fmt: skip
    # Never a view: a model may add to it in place, which autograd forbids for views.
    y = x.new_empty((*shape[:-1], out_features))
    if not stored.has_kernel or (tokens > FEW_TOKENS_ELSEWHERE and tokens > few_tokens(scheme)):
        product = _multiply_decoded(library, stored, x.view(tokens, in_features))
        y.view(tokens, out_features).copy_(product if bias is None else product + bias)
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
        or not matrix(scheme, problem.out_features, problem.in_features).has_kernel
    ):
        return None
    numbers = torch.tensor(_numbers(scheme, problem.in_features), dtype=torch.int32, device="cpu")
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


def few_tokens(scheme: VQScheme) -> int:
    """Up to how many tokens the kernel multiplies with codes."""
    shape = scheme.vector_size, scheme.entry_bits
    if shape[0] % 8 == 0 and shape not in _TABLES and not scheme.lattice:
        return FEW_TOKENS_ELSEWHERE  # entries are multiplied as floats
    return FEW_TOKENS.get(native.isa() or "", FEW_TOKENS_ELSEWHERE)


def _half(tensor: Tensor) -> Tensor:
    return tensor.to(_HALF).contiguous()


def _multiply_decoded(library: ctypes.CDLL, stored: Matrix, x: Tensor) -> Tensor:
    """W x of many tokens [tokens, in]: [tokens, out] in float32, or in the dtype of the product."""
    fast_bfloat16 = x.dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()
    dtype = torch.bfloat16 if fast_bfloat16 else torch.float32
    pointer, number = ctypes.byref(stored), native.DTYPES[dtype]
    rotated = torch.empty(x.shape, dtype=dtype)
    status = library.hf_vq_rotate(
        pointer, x.data_ptr(), native.DTYPES[x.dtype], len(x), rotated.data_ptr(), number
    )
    if status != native.OK:
        native.check(status, "rotate")
    out_features: int = stored.out
    dense = torch.empty((min(DECODED_ROWS, out_features), stored.in_features), dtype=dtype)
    y = torch.empty((out_features, len(x)), dtype=dtype)
    for first in range(0, out_features, DECODED_ROWS):
        count = min(DECODED_ROWS, out_features - first)
        status = library.hf_vq_decode(pointer, first, count, dense.data_ptr(), number)
        if status != native.OK:
            native.check(status, "decode")
        torch.mm(dense[:count], rotated.T, out=y[first : first + count])
    return y.T


def decode(weight: StoredWeight) -> Tensor:
    """The stored rows, rotated back (`ops.reference.decode`): [..., length] float32."""
    (codes, codebook, scale, rotation), _, scheme, length = weight
    lead = codes.shape[:-1]
    codes, codebook, scale = codes.contiguous(), _half(codebook), _half(scale)
    stored = matrix(
        scheme, max(math.prod(lead), 1), length,
        codes.data_ptr(), codebook.data_ptr(), scale.data_ptr(),
    )  # fmt: skip
    rows = torch.empty((*lead, length), dtype=torch.float32)
    count, pointer, float32 = math.prod(lead), ctypes.byref(stored), native.DTYPES[torch.float32]
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
    if not matrix(scheme, problem.out_features, problem.in_features).has_kernel:
        return (
            f"{scheme.notation()} has no kernel that multiplies with codes: its rows are decoded, "
            f"{DECODED_ROWS} at a time, at every call"
        )
    if _looks_up_slowly(scheme):
        return f"looking up {scheme.notation()} takes long without AVX-512 VBMI"
    return None


def is_slow(problem: dispatch.LinearProblem) -> bool:
    """True if no kernel multiplies with the codes, or one that takes longer than a dense weight."""
    scheme = VQScheme.parse(problem.scheme)
    stored = matrix(scheme, problem.out_features, problem.in_features)
    return not stored.has_kernel or _looks_up_slowly(scheme)


def _looks_up_slowly(scheme: VQScheme) -> bool:
    """Levels of 16 bits (linear_levels.h) in parts of 16 entries."""
    levels = scheme.vector_size == 1 and scheme.entry_bits in (6, 8)
    return levels and native.isa() not in FEW_TOKENS


LINEAR = Implementation(linear, supports, bind, grouped=grouped, note=note, is_slow=is_slow)
DECODE = Implementation(decode, supports_decode)
