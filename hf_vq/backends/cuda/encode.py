"""`encode_weight` and `round_weight` on a GPU: generated kernels that search codebooks.

One searches scales, finds codes and packs them; the other passes errors on from vector to vector.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from ...codegen.encode_plan import EncodePlan, RoundPlan, SearchPlan
from ...codegen.families.encode import encode_plan, round_plan
from ...codegen.jit.device import device_arch
from ...codegen.jit.kernel_store import default_store
from ...codegen.jit.launch import LoadedKernel
from ...dispatch import Implementation
from ...errors import VQFormatError
from ...formats.packing import packed_size
from ...formats.scheme import VQScheme
from . import weight_supports
from .linear.dequantize import _ready

_WARP = 32


class EncodeArguments(ctypes.Structure):
    """struct Arguments of kernels/cuda/encode/encode.cu."""

    _fields_ = [
        ("rows", ctypes.c_void_p),
        ("codebook", ctypes.c_void_p),
        ("factors", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("groups", ctypes.c_int64),
        ("columns", ctypes.c_int32),
    ]


@functools.lru_cache(maxsize=256)
def _encoder(
    scheme: VQScheme, in_features: int, candidates: int, refit: bool, ordinal: int
) -> tuple[LoadedKernel, EncodePlan]:
    plan = encode_plan(scheme, in_features, candidates, refit)
    return LoadedKernel(plan, EncodeArguments, ordinal, default_store()), plan


class RoundArguments(ctypes.Structure):
    """struct Arguments of kernels/cuda/encode/round_rows.cu."""

    _fields_ = [
        ("rows", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("codebook", ctypes.c_void_p),
        ("feedback", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("columns", ctypes.c_int32),
        ("group", ctypes.c_int32),
    ]


@functools.lru_cache(maxsize=256)
def _rounder(scheme: VQScheme, size: int, ordinal: int) -> tuple[LoadedKernel, RoundPlan]:
    plan = round_plan(scheme, size)
    return LoadedKernel(plan, RoundArguments, ordinal, default_store()), plan


@functools.lru_cache(maxsize=16)
def _on_device(factors: tuple[float, ...], ordinal: int) -> Tensor:
    return torch.tensor(factors, dtype=torch.float32, device=f"cuda:{ordinal}")


def encode_weight(
    rows: Tensor, codebook: Tensor, scheme: VQScheme, factors: tuple[float, ...], refit: bool
) -> tuple[Tensor, Tensor]:
    """`ops.encode_weight`; scales and codes agree with its specification up to rounding.

    Raises:
        VQFormatError: the codebook is not one of the scheme. A kernel would read what is not there.
    """
    count, in_features = rows.shape
    _check(codebook, scheme)
    of_row = in_features // scheme.group(in_features)
    groups = count * of_row
    scale = torch.empty(count, of_row, dtype=torch.float16, device=rows.device)
    vectors = count * (in_features // scheme.vector_size)
    # Whole words: a warp writes the codes of all its lanes.
    words = -(-vectors // _WARP) * scheme.entry_bits * scheme.streams
    codes = torch.empty(words, dtype=torch.int32, device=rows.device)
    ordinal = rows.device.index
    with torch.cuda.device(rows.device):
        kernel, plan = _encoder(scheme, in_features, len(factors), refit, ordinal)
        warps = plan.threads // _WARP * plan.groups_of_warp
        rows, codebook = _ready(rows, torch.float32), _ready(codebook, torch.float16)
        kernel(
            _blocks(-(-groups // warps), plan, ordinal),
            torch._C._cuda_getCurrentRawStream(ordinal),
            rows.data_ptr(),
            codebook.data_ptr(),
            _on_device(factors, ordinal).data_ptr(),
            codes.data_ptr(),
            scale.data_ptr(),
            groups,
            in_features,
        )
    stream = packed_size(in_features // scheme.vector_size, scheme.entry_bits) * scheme.streams
    packed = codes.view(torch.uint8)[: count * stream].view(count, stream)
    return packed, scale


def round_weight(
    rows: Tensor, scale: Tensor, codebook: Tensor, scheme: VQScheme, feedback: Tensor
) -> Tensor:
    """`ops.round_weight`; codes agree with its specification up to rounding.

    Raises:
        VQFormatError: the codebook is not one of the scheme, or scales or feedback are not of whole
            blocks. A kernel would read what is not there.
    """
    _check(codebook, scheme)
    count, in_features = rows.shape
    size, groups = feedback.shape[-1], scale.shape[-1]
    fits = in_features % size == 0 and in_features % groups == 0
    fits = fits and in_features // groups % size == 0 and scale.shape == (count, groups)
    if not fits or feedback.shape != (in_features // size, size, size):
        raise VQFormatError(
            f"rows {list(rows.shape)} need scales [rows, groups] and feedback [blocks, size, size] "
            f"of whole blocks; got {list(scale.shape)} and {list(feedback.shape)}."
        )
    shape = count, in_features // scheme.vector_size, scheme.streams
    codes = torch.empty(shape, dtype=torch.int32, device=rows.device)
    ordinal = rows.device.index
    with torch.cuda.device(rows.device):
        kernel, plan = _rounder(scheme, size, ordinal)
        rows, scale = _ready(rows, torch.float32), _ready(scale, torch.float32)
        codebook = _ready(codebook, torch.float16)
        feedback = _ready(feedback.mT, torch.float32)
        tiles = -(-count // plan.rows) * (in_features // size)
        kernel(
            _blocks(tiles, plan, ordinal),
            torch._C._cuda_getCurrentRawStream(ordinal),
            rows.data_ptr(),
            scale.data_ptr(),
            codebook.data_ptr(),
            feedback.data_ptr(),
            codes.data_ptr(),
            count,
            in_features,
            in_features // groups,
        )
    return codes


def _blocks(work: int, plan: SearchPlan, ordinal: int) -> int:
    """Blocks of threads for so many pieces of work: at least one, and no more than run at once."""
    return max(1, min(work, plan.blocks_per_sm * device_arch(ordinal).sms))


def _check(codebook: Tensor, scheme: VQScheme) -> None:
    entries = 257 if scheme.lattice else scheme.entries
    if codebook.shape != (scheme.streams, entries, scheme.vector_size):
        raise VQFormatError(
            f"{scheme.spec()} needs a codebook "
            f"{[scheme.streams, entries, scheme.vector_size]}; got {list(codebook.shape)}."
        )


ENCODE = Implementation(encode_weight, weight_supports.encode_weight)

ROUND = Implementation(round_weight, weight_supports.round_weight)
"""Codes of rotated rows, errors passed on inside of blocks."""
