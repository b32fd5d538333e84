"""`struct hf_vq_matrix`: a weight as libhf_vq_cpu takes it, and which weights it takes."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from ... import dispatch
from ...formats.scheme import VQScheme
from .. import refusals
from . import library as native

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
    numbers = numbers_of(VQScheme.parse(spec), in_features)
    described = Matrix(None, None, None, None, None, out_features, in_features, *numbers)
    library = native.load()
    return numbers, bool(
        library and library.hf_vq_linear_supports(ctypes.byref(described)) == native.OK
    )


def numbers_of(scheme: VQScheme, in_features: int) -> tuple[int, ...]:
    """The last fields of `hf_vq_matrix`."""
    scope = _E8P if scheme.lattice else _TILE if scheme.codebook == "tile" else _SHARED
    return (
        scheme.vector_size, scheme.entry_bits, scheme.streams, scope, *scheme.tile,
        scheme.group(in_features), scheme.block(in_features),
    )  # fmt: skip


def supports(problem: dispatch.LinearProblem | dispatch.InputGradientProblem) -> str | None:
    """None if the library multiplies with such a matrix, else the reason why not."""
    reason = refusals.dtype(problem.dtype, refusals.FLOATS)
    return reason or decodable(VQScheme.parse(problem.scheme))


def decodable(scheme: VQScheme) -> str | None:
    """None if the library decodes rows of a scheme, else the reason why not."""
    if scheme.stages != "independent":
        return f"{scheme.stages} stages have a second pass"
    reason = refusals.mode(scheme) or refusals.qr(scheme) or refusals.zero(scheme)
    if reason is None and scheme.codebook == "channel_group":
        return "it has codebooks per channel group"
    return reason


def half(tensor: Tensor) -> Tensor:
    """The same numbers as the kernels read them: fp16, one after the other."""
    return tensor.to(torch.float16).contiguous()
