"""The rotary mean of a cache's keys (`ops.rotary_mean`) as kernels take it."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from ....codegen.packed import INT32, INT64, POINTER, Packed
from ....errors import VQFormatError
from ....ops.kv import KVCacheView

ROTARY_MEAN = Packed([
    ("mean inv_freq", POINTER), ("row head", INT64), ("pairs interleaved", INT32), ("start", INT64),
])  # fmt: skip
"""struct RotaryMean of kernels/cuda/primitives/rotary.cuh."""
_TYPES: dict[str, Any] = {POINTER: ctypes.c_void_p, INT64: ctypes.c_int64, INT32: ctypes.c_int32}
FIELDS: list[Any] = [(f"rotary_{name}", _TYPES[str(kind)]) for name, kind in ROTARY_MEAN.members]
"""The same behind the fields of another structure."""

FARTHEST = 1 << 28
"""How far from 0 the first position may be: kernels double positions in 32 bits."""


def rotary_mean(view: KVCacheView) -> tuple[int, ...]:
    """Its members, checked: a kernel would read, or write, anywhere. Rows of a cache in pages share
    the mean: they lie 0 apart.

    Raises:
        VQFormatError: shapes or dtypes are not those of a view, or positions are too large.
    """
    mean, inv_freq = view.key_rotary_mean, view.rotary_inv_freq
    assert mean is not None
    rows, heads, _, dim = view.key.recent.shape
    shape = (1 if view.page_table is not None else rows, heads, 1, dim)
    if (
        inv_freq is None
        or mean.shape != shape
        or mean.dtype is not torch.float32
        or mean.stride(3) != 1
        or inv_freq.dtype is not torch.float32
        or inv_freq.device != mean.device
        or inv_freq.ndim != 1
        or not inv_freq.is_contiguous()
        or 2 * len(inv_freq) > dim
    ):
        raise VQFormatError(
            f"a rotary mean is float32 {list(shape)} with frequencies float32 [r], r pairs of "
            f"channels; got {list(mean.shape)} of {mean.dtype}"
            + ("." if inv_freq is None else f" and {list(inv_freq.shape)} of {inv_freq.dtype}.")
        )
    if abs(view.rotary_start) > FARTHEST:
        raise VQFormatError(
            f"keys with a rotary mean have positions within {FARTHEST} of 0; got "
            f"{view.rotary_start}. Count positions from the first token, or use a view without "
            "`key_rotary_mean`."
        )
    row = 0 if shape[0] == 1 else mean.stride(0)
    return (
        mean.data_ptr(), inv_freq.data_ptr(), row, mean.stride(1), len(inv_freq),
        view.rotary_interleaved, view.rotary_start,
    )  # fmt: skip
