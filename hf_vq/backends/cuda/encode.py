"""`encode_weight` on a GPU: one generated kernel searches scales, finds codes and packs them."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from ...codegen.families.encode import encode_plan
from ...codegen.jit.device import device_arch
from ...codegen.jit.kernel_store import default_store
from ...codegen.jit.launch import LoadedKernel
from ...codegen.plan import EncodePlan
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
    entries = 257 if scheme.lattice else scheme.entries
    if codebook.shape != (scheme.streams, entries, scheme.vector_size):
        raise VQFormatError(
            f"{scheme.spec()} needs a codebook "
            f"{[scheme.streams, entries, scheme.vector_size]}; got {list(codebook.shape)}."
        )
    groups = count * (in_features // scheme.group(in_features))
    scale = torch.empty(groups, dtype=torch.float16, device=rows.device)
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
            min(-(-groups // warps), plan.blocks_per_sm * device_arch(ordinal).sms),
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
    return packed, scale.view(count, -1)


ENCODE = Implementation(encode_weight, weight_supports.encode_weight)
