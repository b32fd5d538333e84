"""`struct hf_vq_matrix`: a weight as libhf_vq_cpu takes it, and which weights it takes."""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache

import torch
from torch import Tensor

from ... import dispatch
from ...formats.scheme import VQScheme
from ...formats.stored_weight import StoredWeight
from .. import refusals
from . import library as native

_SHARED, _TILE, _E8P = range(3)  # enum hf_vq_scope
_HALF = torch.float16


class Matrix(ctypes.Structure):
    """struct hf_vq_matrix of api.h."""

    _fields_ = [
        ("codes", ctypes.c_void_p),
        ("second", ctypes.c_void_p),
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
        ("second_bits", ctypes.c_int32),
    ]
    has_kernel: bool  # whether hf_vq_linear multiplies with it; hf_vq_decode decodes any
    kept: tuple[Tensor | None, ...]  # what lies at the addresses


def has_kernel(scheme: VQScheme, out_features: int, in_features: int) -> bool:
    """Whether the library multiplies with the codes of such a matrix. It decodes any."""
    return _shape(scheme.key, out_features, in_features)[1]


def matrix(weight: StoredWeight) -> Matrix:
    """A weight as the library takes it. Rows may have several leading dimensions. Without its
    second codes, a weight of nested passes is the first one."""
    (codes, codebook, scale, rotation), residual, scheme, in_features = weight
    second = None
    if residual is not None:
        second, codebook = residual.codes, residual.codebook
    elif scheme.stages != "independent":
        scheme = _first_pass(scheme.key)
    is_scaled = scheme.is_scaled
    turned_by = _HALF if is_scaled else torch.uint8
    if not (
        codes.is_contiguous() and codebook.is_contiguous() and codebook.dtype is _HALF
        and scale.is_contiguous() and scale.dtype is _HALF
        and (rotation is None or (rotation.is_contiguous() and rotation.dtype is turned_by))
        and (second is None or second.is_contiguous())
    ):  # fmt: skip
        codes, codebook, scale = codes.contiguous(), half(codebook), half(scale)
        rotation = None if rotation is None else rotation.to(turned_by).contiguous()
        second = None if second is None else second.contiguous()
    rows = math.prod(codes.shape[:-1])
    numbers, multiplied = _shape(scheme.key, rows, in_features)
    turned = None if rotation is None else rotation.data_ptr()
    found = Matrix(
        codes.data_ptr(), None if second is None else second.data_ptr(), codebook.data_ptr(),
        scale.data_ptr(), None if is_scaled else turned, turned if is_scaled else None,
        rows, in_features, *numbers,
    )  # fmt: skip
    found.has_kernel, found.kept = multiplied, (codes, codebook, scale, rotation, second)
    return found


@lru_cache(maxsize=64)
def _first_pass(spec: str) -> VQScheme:
    return VQScheme.parse(spec).first_pass()


@lru_cache(maxsize=1024)
def _shape(spec: str, out_features: int, in_features: int) -> tuple[tuple[int, ...], bool]:
    """What all matrices of a shape share: numbers of `hf_vq_matrix`, and whether a kernel
    multiplies with them. Nothing here is of a single tensor, so it does not outlive models."""
    numbers = numbers_of(VQScheme.parse(spec), in_features)
    shape = Matrix(*[None] * 6, out_features, in_features, *numbers)
    library = native.load()
    return numbers, bool(
        library and library.hf_vq_linear_supports(ctypes.byref(shape)) == native.OK
    )


def numbers_of(scheme: VQScheme, in_features: int) -> tuple[int, ...]:
    """The last fields of `hf_vq_matrix`."""
    scope = _E8P if scheme.lattice else _TILE if scheme.codebook == "tile" else _SHARED
    return (
        scheme.vector_size, scheme.entry_bits, scheme.streams, scope, *scheme.tile,
        scheme.group(in_features), scheme.block(in_features), scheme.second_bits,
    )  # fmt: skip


def supports(problem: dispatch.LinearProblem | dispatch.InputGradientProblem) -> str | None:
    """None if the library multiplies with such a matrix, else the reason why not."""
    reason = refusals.dtype(problem.dtype, refusals.FLOATS)
    return reason or decodable(VQScheme.parse(problem.scheme))


def decodable(scheme: VQScheme) -> str | None:
    """None if the library decodes rows of a scheme, else the reason why not."""
    if scheme.stages not in ("independent", "nested"):
        return f"{scheme.stages} passes are two products"
    reason = refusals.mode(scheme) or refusals.qr(scheme) or refusals.zero(scheme)
    if reason is None and scheme.codebook == "channel_group":
        return "it has codebooks per channel group"
    return reason


def half(tensor: Tensor) -> Tensor:
    """The same numbers as the kernels read them: fp16, one after the other."""
    return tensor.to(_HALF).contiguous()
