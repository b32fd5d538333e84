"""`cpu.w4a8_linear`: integers of 4 and 8 bits, multiplied by libhf_vq_cpu."""

from __future__ import annotations

import ctypes

from torch import Tensor

from ...dispatch import Implementation, W4A8LinearProblem
from ...errors import VQSchemeError
from ...formats.qoq import QoQScheme
from ...formats.stored_weight import W4A8Weight
from ...ops import w4a8
from .. import refusals
from . import library as native


class Matrix(ctypes.Structure):
    """struct hf_vq_w4a8 of api.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("codes", "scale", "row_zero", "step", "zero")),
        *((name, ctypes.c_int64) for name in ("out", "in_features", "group")),
    ]


def matrix(scheme: QoQScheme, rows: int, columns: int, *addresses: int | None) -> Matrix:
    """The description of a matrix whose codes, scale, zero and step lie at these addresses."""
    codes, scale, zero, step = addresses or (None,) * 4
    of_row, of_groups = (None, zero) if scheme.group else (zero, None)
    return Matrix(codes, scale, of_row, step, of_groups, rows, columns, scheme.group_of(columns))


def supports(problem: W4A8LinearProblem) -> str | None:
    """None if the library multiplies with such a matrix, else the reason why not."""
    if reason := refusals.dtype(problem.dtype, refusals.FLOATS):
        return reason
    try:
        described = matrix(w4a8.parse(problem.scheme), problem.out_features, problem.in_features)
    except VQSchemeError as error:
        return str(error)
    library = native.load()
    if library is None or library.hf_vq_w4a8_supports(ctypes.byref(described)) != native.OK:
        return f"sums of {problem.in_features} products may need more than 32 bits"
    return None


def linear(x: Tensor, weight: W4A8Weight, bias: Tensor | None) -> Tensor:
    """y = W round(x) + b, the same numbers as `ops.w4a8.reference`.

    Raises:
        VQFormatError: tensors do not belong together.
    """
    library = native.load()
    assert library is not None
    rows, columns = weight.codes.shape[0], weight.in_features
    ready = w4a8.checked(weight, x.device)
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in ready.tensors]
    x = x.contiguous()
    y = x.new_empty((*x.shape[:-1], rows))
    address, bias_dtype = None, 0
    if bias is not None:
        bias = bias.contiguous() if bias.dtype in native.DTYPES else bias.float().contiguous()
        address, bias_dtype = bias.data_ptr(), native.DTYPES[bias.dtype]
    status = library.hf_vq_w4a8_linear(
        ctypes.byref(matrix(weight.scheme, rows, columns, *addresses)), x.data_ptr(),
        native.DTYPES[x.dtype], x.numel() // columns, address, bias_dtype, y.data_ptr(),
    )  # fmt: skip
    native.check(status, "w4a8_linear")
    return y


LINEAR = Implementation(linear, supports)
