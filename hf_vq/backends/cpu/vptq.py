"""`cpu.vptq_linear`: weights as VPTQ publishes them, multiplied by libhf_vq_cpu."""

from __future__ import annotations

import ctypes

from torch import Tensor

from ...dispatch import Implementation, PublishedLinearProblem
from ...formats.published import VptqLayout
from ...formats.published.layout import dtype_named
from ...ops import published
from ...ops.published import PublishedWeight
from .. import refusals
from . import library as native

_ADDRESSES = {  # fields of hf_vq_vptq, and keys of the stored tensors
    "codes": "codes", "book": "centroids", "rest": "res_centroids",
    "outlier_codes": "outlier_indices", "outlier_book": "outlier_centroids",
    "scale": "weight_scale", "offset": "weight_bias", "order": "perm",
}  # fmt: skip


class Vptq(ctypes.Structure):
    """struct hf_vq_vptq of api.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _ADDRESSES),
        *((name, ctypes.c_int64) for name in ("out", "in_features", "columns", "outliers")),
        *(
            (name, ctypes.c_int32)
            for name in (
                "groups", "vector", "bits", "entries", "rest_bits", "rest_entries",
                "outlier_vector", "outlier_entries", "dtype",
            )
        ),
    ]  # fmt: skip


def matrix(layout: VptqLayout, rows: int, columns: int, *addresses: int | None) -> Vptq:
    """The description of a matrix whose tensors lie at these addresses, in that order."""
    (bits, rest_bits), dtype = layout.bits, native.DTYPES[dtype_named(layout.dtype)]
    return Vptq(
        *(addresses or [None] * len(_ADDRESSES)), rows, columns, layout.group_size,
        layout.outliers, layout.groups, layout.vector, bits, layout.centroids, rest_bits,
        layout.residual, layout.outlier_vector, layout.outlier_centroids, dtype,
    )  # fmt: skip


def supports(problem: PublishedLinearProblem) -> str | None:
    """None if the library multiplies with such codes, else the reason why not."""
    layout = published.parse(problem.published)
    if not isinstance(layout, VptqLayout):
        return f"the library knows VPTQ's layout, not that of {layout.name()}"
    if reason := refusals.dtype(problem.dtype, refusals.FLOATS):
        return reason
    library = native.load()
    described = ctypes.byref(matrix(layout, problem.out_features, problem.in_features))
    if library is None or library.hf_vq_vptq_supports(described) != native.OK:
        return f"{layout.name()} with {layout.dtype} codebooks: entries have more rows, or 32 bits"
    return None


def linear(x: Tensor, weight: PublishedWeight, bias: Tensor | None) -> Tensor:
    """y = W x + b (`ops.published.reference`), summed in float32 and rounded once.

    Raises:
        VQFormatError: tensors do not belong together.
    """
    library = native.load()
    assert library is not None
    _, layout, rows, columns = weight
    assert isinstance(layout, VptqLayout)
    held = published.checked(weight, bias, x.device)
    held = {key: tensor.contiguous() for key, tensor in held.items()}  # kept until it has run
    addresses = [held[key].data_ptr() if key in held else None for key in _ADDRESSES.values()]
    x = x.contiguous()
    y = x.new_empty((*x.shape[:-1], rows))
    address, bias_dtype = None, 0
    if bias is not None:
        bias = bias.contiguous() if bias.dtype in native.DTYPES else bias.float().contiguous()
        address, bias_dtype = bias.data_ptr(), native.DTYPES[bias.dtype]
    status = library.hf_vq_vptq_linear(
        ctypes.byref(matrix(layout, rows, columns, *addresses)), x.data_ptr(),
        native.DTYPES[x.dtype], x.numel() // columns, address, bias_dtype, y.data_ptr(),
    )  # fmt: skip
    native.check(status, "published_linear")
    return y


LINEAR = Implementation(linear, supports)
