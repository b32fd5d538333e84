"""`cpu.encode_weight` and `cpu.round_weight`: rows of a weight to codes by libhf_vq_cpu."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from ...dispatch import EncodeWeightProblem, Implementation, RoundWeightProblem
from ...formats.scheme import VQScheme
from ...ops.library import parse
from ...ops.reference.encode_weight import packed
from . import library as native

_CELLS, _MOST_NEAR, _NEAR_LANES = 4096, 32, 16  # HF_VQ_CELLS and others of api.h


class Cells(ctypes.Structure):
    """struct hf_vq_cells of api.h."""

    _fields_ = [
        ("near", ctypes.c_void_p),
        ("numbers", ctypes.c_void_p),
        ("count", ctypes.c_int32),
        ("reach", ctypes.c_float),
    ]
    memory: tuple[Tensor, Tensor]  # of `near` and `numbers`


class Rows(ctypes.Structure):
    """struct hf_vq_rows of api.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("rows", "codebook")),
        *((name, ctypes.c_int64) for name in ("n", "in_features", "group")),
        *((name, ctypes.c_int32) for name in ("x", "entries")),
        *((name, ctypes.c_void_p) for name in ("factor_cells", "scale_cells")),
    ]
    cells: list[tuple[str, Cells | None]]  # which live as long as it does


def _rows(scheme: VQScheme, in_features: int, count: int = 0, *addresses: int | None) -> Rows:
    group, (rows, codebook) = scheme.group(in_features), addresses or (0, 0)
    return Rows(
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


@lru_cache(maxsize=16)
def _cells(book: bytes, vector_size: int, factors: tuple[float, ...]) -> Cells | None:
    """Which entries of a codebook may be the nearest, by place; None if too many may.

    Args:
        book: fp16 [entries, vector_size].
        factors: of the scales that are tried; none = the scale is known.
    """
    library, entries = native.load(), torch.frombuffer(bytearray(book), dtype=torch.float16)
    assert library is not None
    described = Rows(
        None, entries.data_ptr(), 0, vector_size, vector_size, vector_size,
        len(entries) // vector_size,
    )  # fmt: skip
    cells, lanes = Cells(), 0 if factors else _NEAR_LANES
    tried = factors or (1.0,)
    cells.memory = near, numbers = (
        torch.empty(_CELLS * _MOST_NEAR, dtype=torch.uint8, device="cpu"),
        torch.empty(_CELLS * (vector_size + 1) * lanes, dtype=torch.float32, device="cpu"),
    )
    status = library.hf_vq_make_cells(
        ctypes.byref(described), (ctypes.c_float * len(tried))(*tried), len(tried),
        near.data_ptr(), numbers.data_ptr() if lanes else None, ctypes.byref(cells),
    )  # fmt: skip
    if status == native.UNSUPPORTED:
        return None
    native.check(status, "make_cells")  # not kept: there may be memory next time
    return cells


def _look_near(described: Rows, book: Tensor, factors: tuple[float, ...]) -> None:
    """Let a search compare what is near, where that is known."""
    if described.x > 2 or not described.n:
        return
    stored = book.numpy().tobytes()
    wanted = [("scale_cells", ())] + ([("factor_cells", factors)] if len(factors) > 1 else [])
    described.cells = [(field, _cells(stored, described.x, tried)) for field, tried in wanted]
    for field, cells in described.cells:
        if cells is not None:
            setattr(described, field, ctypes.addressof(cells))


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
    _look_near(described, book, factors)
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
    _look_near(described, book, ())
    status = library.hf_vq_round_weight(
        ctypes.byref(described), scale.data_ptr(), feedback.data_ptr(), feedback.shape[-1],
        codes.data_ptr(),
    )  # fmt: skip
    native.check(status, "round_weight")
    return codes[..., None]


ENCODE = Implementation(encode_weight, supports)
ROUND = Implementation(round_weight, supports)
