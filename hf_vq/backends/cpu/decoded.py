"""Products of many tokens with a decoded weight: of `cpu.linear`, and `cpu.input_gradient`.

    y     = rotate(x) rows^T                rows: the weight as it is stored, decoded, still rotated
    dL/dx = rotate_back(dL/dy rows)

Tokens are rotated, not the weight. Rows are decoded in parts, in the dtype in which PyTorch
multiplies fastest: bfloat16 where the processor has instructions for it and x is bfloat16.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...dispatch import Implementation
from ...formats.packing import unpack_bits
from ...formats.stored_weight import StoredWeight
from . import library as native
from . import matrices

DECODED_BYTES = 8 << 20  # of rows at once: several smaller products take longer than one


def multiply(
    library: ctypes.CDLL, stored: matrices.Matrix, x: Tensor, bias: Tensor | None, y: Tensor
) -> None:
    """y [tokens, out] = W x + b of tokens [tokens, in]."""
    dense = _room(stored, x)
    product = y if y.dtype == dense.dtype else torch.empty(y.shape, dtype=dense.dtype)
    rotated = torch.empty(x.shape, dtype=dense.dtype)
    _rotate(library, stored, x, rotated)
    for first in range(0, stored.out, len(dense)):
        rows = _decode(library, stored, first, dense)
        torch.mm(rotated, rows.T, out=product[:, first : first + len(rows)])
    if bias is not None:
        product += bias
    if product is not y:
        y.copy_(product)


def input_gradient(grad: Tensor, weight: StoredWeight) -> Tensor:
    """dL/dx [..., in] of dL/dy `grad` [..., out]."""
    library = native.load()
    assert library is not None
    (_, _, _, rotation), _, scheme, in_features = weight
    stored = matrices.matrix(weight)
    stored.signs = stored.diagonal = None
    x = _multiply_transposed(library, stored, grad.reshape(-1, stored.out))
    if scheme.rotation != "none":  # a Hadamard transform is its own inverse
        # Signs keep what is rounded, other diagonals are multiplied with before it is.
        rotated = x if rotation is None or not scheme.is_scaled else x.float()
        _rotate(library, stored, x, rotated)
        x = rotated
    if rotation is not None and scheme.is_scaled:
        x = x * rotation
    elif rotation is not None:
        x *= 1 - 2 * unpack_bits(rotation, 1, in_features)
    return x.to(grad.dtype).view(*grad.shape[:-1], in_features)


def _multiply_transposed(library: ctypes.CDLL, stored: matrices.Matrix, tokens: Tensor) -> Tensor:
    """`tokens` [tokens, out] times the rows, in the dtype of products, or in float32 from several
    parts."""
    dense = _room(stored, tokens)
    tokens = tokens.to(dense.dtype)
    if len(dense) == stored.out:
        return tokens @ _decode(library, stored, 0, dense)
    total = torch.zeros((len(tokens), stored.in_features))
    for first in range(0, stored.out, len(dense)):
        rows = _decode(library, stored, first, dense)
        total += tokens[:, first : first + len(rows)] @ rows
    return total


def _room(stored: matrices.Matrix, x: Tensor) -> Tensor:
    """Memory for some rows of a weight, or for all, in the dtype of products with x."""
    fast = x.dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()
    dtype = torch.bfloat16 if fast else torch.float32
    at_once = max(1, DECODED_BYTES // (stored.in_features * dtype.itemsize))
    return torch.empty((min(at_once, stored.out), stored.in_features), dtype=dtype)


def _decode(library: ctypes.CDLL, stored: matrices.Matrix, first: int, dense: Tensor) -> Tensor:
    """Rows from `first` on, still rotated, as many as are left for `dense`."""
    rows = dense[: stored.out - first]
    status = library.hf_vq_decode(
        ctypes.byref(stored), first, len(rows), rows.data_ptr(), native.DTYPES[rows.dtype]
    )
    if status != native.OK:
        native.check(status, "decode")
    return rows


def _rotate(library: ctypes.CDLL, stored: matrices.Matrix, x: Tensor, rotated: Tensor) -> None:
    status = library.hf_vq_rotate(
        ctypes.byref(stored), x.data_ptr(), native.DTYPES[x.dtype], len(x),
        rotated.data_ptr(), native.DTYPES[rotated.dtype],
    )  # fmt: skip
    if status != native.OK:
        native.check(status, "rotate")


GRADIENT = Implementation(input_gradient, matrices.supports)
