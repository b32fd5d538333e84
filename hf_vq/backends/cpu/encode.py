"""`cpu.encode_weight` and `cpu.round_weight`: rows of a weight to codes by libhf_vq_cpu."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...dispatch import EncodeWeightProblem, Implementation, RoundWeightProblem
from ...formats.scheme import VQScheme
from ...ops.library import parse
from ...ops.reference.encode_weight import packed
from . import library as native


class _Rows(ctypes.Structure):
    """struct hf_vq_rows of api.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("rows", "codebook")),
        *((name, ctypes.c_int64) for name in ("n", "in_features", "group")),
        *((name, ctypes.c_int32) for name in ("x", "entries")),
    ]


def _rows(scheme: VQScheme, in_features: int, count: int = 0, *addresses: int) -> _Rows:
    group, (rows, codebook) = scheme.group(in_features), addresses or (0, 0)
    return _Rows(
        rows, codebook, count, in_features, group, scheme.vector_size, 1 << scheme.entry_bits
    )


def supports(problem: EncodeWeightProblem | RoundWeightProblem) -> str | None:
    """None if the library encodes such rows, else the reason why not."""
    scheme = parse(problem.scheme)
    if scheme.codebook != "universal" or scheme.lattice is not None or scheme.streams > 1:
        return "the library searches one universal codebook, and no lattice"
    library = native.load()
    described = ctypes.byref(_rows(scheme, problem.in_features))
    if library is None or library.hf_vq_rows_supported(described) != native.OK:
        return f"{scheme.spec()}: entries have more than 4 numbers, or there are more than 256"
    return None


def encode_weight(
    rows: Tensor, codebook: Tensor, scheme: VQScheme, factors: tuple[float, ...], refit: bool
) -> tuple[Tensor, Tensor]:
    """`ops.encode_weight`; scales and codes agree with its specification up to rounding."""
    library = native.load()
    assert library is not None
    rows, book = rows.contiguous(), codebook.half().contiguous()
    n, length = rows.shape
    codes = rows.new_empty(n, length // scheme.vector_size, dtype=torch.uint8)
    scale = rows.new_empty(n, length // scheme.group(length), dtype=torch.float16)
    described = _rows(scheme, length, n, rows.data_ptr(), book.data_ptr())
    tried = (ctypes.c_float * len(factors))(*factors)
    status = library.hf_vq_encode_weight(
        ctypes.byref(described), tried, len(factors), int(refit), codes.data_ptr(), scale.data_ptr()
    )
    native.check(status, "encode_weight")
    return packed(codes[..., None], scheme), scale


def round_weight(
    rows: Tensor, scale: Tensor, codebook: Tensor, scheme: VQScheme, feedback: Tensor
) -> Tensor:
    """`ops.round_weight`; codes agree with its specification up to rounding."""
    library = native.load()
    assert library is not None
    rows, book = rows.contiguous(), codebook.half().contiguous()
    scale, feedback = scale.float().contiguous(), feedback.contiguous()
    n, length = rows.shape
    codes = rows.new_empty(n, length // scheme.vector_size, dtype=torch.uint8)
    described = _rows(scheme, length, n, rows.data_ptr(), book.data_ptr())
    status = library.hf_vq_round_weight(
        ctypes.byref(described), scale.data_ptr(), feedback.data_ptr(), feedback.shape[-1],
        codes.data_ptr(),
    )  # fmt: skip
    native.check(status, "round_weight")
    return codes[..., None]


ENCODE = Implementation(encode_weight, supports)
ROUND = Implementation(round_weight, supports)
