"""`kv_append` on a GPU: a step of a static KV cache in one launch of a generated kernel."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from ....codegen.families.kv_append import append_plan, store_plan
from ....codegen.jit.device import device_arch
from ....codegen.jit.kernel_store import default_store
from ....codegen.jit.launch import LoadedKernel
from ....dispatch import Implementation
from ....errors import VQFormatError
from ....formats.packing import packed_size
from ....formats.scheme import VQScheme
from ....ops.kv import KVCacheView, KVSide
from ....ops.reference import kv_static as static_reference
from ..linear.dequantize import DTYPES
from . import supports
from .append import grid_of, mean_and_smoothing, shares_of
from .rotary_mean import FIELDS, rotary_mean

_ALIGNED = 16  # bytes of the widest load


_SIDE: list[tuple[str, type]] = [  # struct Side of kernels/cuda/kv/kv_step.cu
    ("fresh", ctypes.c_void_p),
    ("codebook", ctypes.c_void_p),
    ("ring", ctypes.c_void_p),
    ("sinks", ctypes.c_void_p),
    ("mean", ctypes.c_void_p),
    ("smoothing", ctypes.c_void_p),
    ("codes", ctypes.c_void_p),
    ("scale", ctypes.c_void_p),
    ("lists", ctypes.c_void_p),
    ("batch", ctypes.c_int64),
    ("head", ctypes.c_int64),
    ("token", ctypes.c_int64),
    ("cells_per_unit", ctypes.c_float),
    ("unused", ctypes.c_int32),
]


class StoreArguments(ctypes.Structure):
    """struct Arguments of kv_step.cu: two sides, one after the other, and the rest."""

    _fields_ = [
        *((f"key_{name}", kind) for name, kind in _SIDE),
        *((f"value_{name}", kind) for name, kind in _SIDE),
        ("start", ctypes.c_void_p),
        ("length", ctypes.c_void_p),
        ("frozen", ctypes.c_void_p),
        ("heads", ctypes.c_int32),
        ("pairs", ctypes.c_int32),
        ("tokens", ctypes.c_int32),
        ("sinks", ctypes.c_int32),
        ("slots", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("capacity", ctypes.c_int32),
        ("shares", ctypes.c_int32),
    ]


class RotaryStoreArguments(ctypes.Structure):
    """The same of keys that have a rotary mean."""

    _fields_ = [*StoreArguments._fields_, *FIELDS]


@functools.lru_cache(maxsize=256)
def _storer(
    keys: tuple[VQScheme, int, torch.dtype, bool],
    values: tuple[VQScheme, int, torch.dtype, bool],
    centred: bool,
    rotary: bool,
    ordinal: int,
) -> tuple[LoadedKernel, tuple[int, ...]]:
    """The kernel, and blocks for all learned codebooks of keys and of values; 0 for no such."""
    sides = [
        append_plan(
            scheme, dim, DTYPES[dtype], centred=mean, aligned=True, few=True, grid=grid,
            rotary=turns,
        )
        for (scheme, dim, dtype, grid), mean, turns in (
            (keys, centred, rotary), (values, False, False)
        )
    ]  # fmt: skip
    across = tuple(side.blocks_across if side.learned else 0 for side in sides)
    arguments = RotaryStoreArguments if rotary else StoreArguments
    return LoadedKernel(store_plan(*sides), arguments, ordinal, default_store()), across


def _side(
    fresh: Tensor, side: KVSide, capacity: int, grid: tuple[Tensor, float] | None
) -> tuple[float | None, ...]:
    """The fields of a side, checked: a kernel would write anywhere."""
    batch, heads, _, dim = fresh.shape
    scheme, ring, sinks, mean = side.parsed, side.recent, side.sinks, side.mean
    smoothing = mean_and_smoothing(side)[1]
    codes, scale, codebook = side.codes, side.scale, side.codebook
    vectors = dim // scheme.vector_size
    books = (1,) if scheme.has_scale else (heads, vectors)
    expected = {
        "ring": (ring, (batch, heads, ring.shape[2], dim), fresh.dtype),
        "sinks": (sinks, (batch, heads, sinks.shape[2], dim), fresh.dtype),
        "mean": (mean, (batch, heads, 1, dim), torch.float32),
        "smoothing": (smoothing, (batch, heads, 1, dim), torch.float32),
        "codes": (codes, (batch, heads, capacity, packed_size(vectors, scheme.entry_bits)),
                  torch.uint8),
        "scale": (scale, (batch, heads, capacity, scheme.row_numbers), torch.float16),
        "codebook": (codebook, (*books, scheme.entries, scheme.vector_size), torch.float16),
    }  # fmt: skip
    for name, (tensor, shape, dtype) in expected.items():
        if tensor is None:
            continue
        if (
            tensor.shape != shape
            or tensor.dtype != dtype
            or not tensor.is_contiguous()
            or tensor.data_ptr() % _ALIGNED
        ):
            raise VQFormatError(
                f"append needs a dense, aligned {name} {list(shape)} of {dtype} for "
                f"{scheme.spec()}; got {list(tensor.shape)} of {tensor.dtype}."
            )
    size = fresh.element_size()
    return (
        fresh.data_ptr(), codebook.data_ptr(), ring.data_ptr(), sinks.data_ptr(),
        None if mean is None else mean.data_ptr(),
        None if smoothing is None else smoothing.data_ptr(), codes.data_ptr(), scale.data_ptr(),
        None if grid is None else grid[0].data_ptr(),
        *(size * stride for stride in fresh.stride()[:3]), 0.0 if grid is None else grid[1], 0,
    )  # fmt: skip


def append(key: Tensor, value: Tensor, view: KVCacheView, slot_mapping: None = None) -> None:
    """`ops.reference.kv_static.kv_append`; the codes of a token are those of a growing cache.

    Raises:
        VQFormatError: shapes, dtypes or memory are not those of a static cache.
    """
    keys, values = view.key, view.value
    length, leftpad, known = view.cache_seqlens, view.cache_leftpad, view.key_mean_known
    assert length is not None
    if known is not None and not keys.parsed.has_scale:  # of no scheme with a name
        return static_reference.kv_append(key, value, view)
    key = key if key.stride(3) == 1 else key.contiguous()
    value = value if value.stride(3) == 1 else value.contiguous()
    batch, heads, tokens, dim = key.shape
    slots, capacity, window = keys.recent.shape[2], keys.codes.shape[2], view.window
    if (
        value.shape[:3] != key.shape[:3]
        or values.recent.shape[2] != slots
        or values.sinks.shape[2] != keys.sinks.shape[2]
        or tokens + window > slots
        or length.dtype != torch.int64
        or (leftpad is not None and (leftpad.dtype != torch.int64 or leftpad.shape != (batch,)))
        or (known is not None and (known.dtype != torch.bool or known.shape != (batch, heads)))
    ):
        raise VQFormatError(
            f"append got keys {list(key.shape)} and values {list(value.shape)} for rings of "
            f"{slots} and {values.recent.shape[2]} tokens and a window of {window}."
        )
    if not key.numel():
        return None
    grids = grid_of(keys.codebook, keys.parsed), grid_of(values.codebook, values.parsed)
    key_side = _side(key, keys, capacity, grids[0])
    value_side = _side(value, values._replace(mean=None), capacity, grids[1])
    rotary = () if view.key_rotary_mean is None else rotary_mean(view)
    ordinal = key.device.index
    with torch.cuda.device(key.device):
        kernel, across = _storer(
            (keys.parsed, dim, key.dtype, grids[0] is not None),
            (values.parsed, value.shape[3], value.dtype, grids[1] is not None),
            keys.mean is not None, bool(rotary), ordinal,
        )  # fmt: skip
        shares = shares_of(batch, heads * sum(across), device_arch(ordinal).sms)
        kernel(
            sum(heads * shares * blocks if blocks else batch * heads for blocks in across),
            torch._C._cuda_getCurrentRawStream(ordinal),
            *key_side,
            *value_side,
            None if leftpad is None else leftpad.data_ptr(),
            length.data_ptr(),
            None if known is None else known.data_ptr(),
            heads,
            batch * heads,
            tokens,
            keys.sinks.shape[2],
            slots,
            window,
            capacity,
            shares,
            *rotary,
            dependent=True,
        )
    return None


APPEND = Implementation(append, supports.store)
