"""`store` on a GPU: a step of a static KV cache in one launch of a generated kernel."""

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
from ....ops.reference import kv_static as static_reference
from ..linear.dequantize import DTYPES
from . import supports
from .append import grid_of, shares_of

_ALIGNED = 16  # bytes of the widest load


_SIDE: list[tuple[str, type]] = [  # struct Side of kernels/cuda/kv/kv_step.cu
    ("fresh", ctypes.c_void_p),
    ("codebook", ctypes.c_void_p),
    ("ring", ctypes.c_void_p),
    ("sinks", ctypes.c_void_p),
    ("mean", ctypes.c_void_p),
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


@functools.lru_cache(maxsize=256)
def _storer(
    keys: tuple[VQScheme, int, torch.dtype, bool],
    values: tuple[VQScheme, int, torch.dtype, bool],
    centred: bool,
    ordinal: int,
) -> tuple[LoadedKernel, tuple[int, ...]]:
    """The kernel, and blocks for all learned codebooks of keys and of values; 0 for no such."""
    sides = [
        append_plan(scheme, dim, DTYPES[dtype], centred=mean, aligned=True, few=True, grid=grid)
        for (scheme, dim, dtype, grid), mean in ((keys, centred), (values, False))
    ]
    across = tuple(side.blocks_across if side.learned else 0 for side in sides)
    return LoadedKernel(store_plan(*sides), StoreArguments, ordinal, default_store()), across


def _side(
    fresh: Tensor,
    ring: Tensor,
    sinks: Tensor,
    mean: Tensor | None,
    codes: Tensor,
    scale: Tensor,
    codebook: Tensor,
    scheme: VQScheme,
    capacity: int,
    grid: tuple[Tensor, float] | None,
) -> tuple[float | None, ...]:
    """The fields of a side, checked: a kernel would write anywhere."""
    batch, heads, _, dim = fresh.shape
    vectors = dim // scheme.vector_size
    books = (1,) if scheme.has_scale else (heads, vectors)
    expected = {
        "ring": (ring, (batch, heads, ring.shape[2], dim), fresh.dtype),
        "sinks": (sinks, (batch, heads, sinks.shape[2], dim), fresh.dtype),
        "mean": (mean, (batch, heads, 1, dim), torch.float32),
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
                f"store needs a dense, aligned {name} {list(shape)} of {dtype} for "
                f"{scheme.spec()}; got {list(tensor.shape)} of {tensor.dtype}."
            )
    size = fresh.element_size()
    return (
        fresh.data_ptr(), codebook.data_ptr(), ring.data_ptr(), sinks.data_ptr(),
        None if mean is None else mean.data_ptr(), codes.data_ptr(), scale.data_ptr(),
        None if grid is None else grid[0].data_ptr(),
        *(size * stride for stride in fresh.stride()[:3]), 0.0 if grid is None else grid[1], 0,
    )  # fmt: skip


def store(
    keys: Tensor,
    values: Tensor,
    sink_k: Tensor,
    sink_v: Tensor,
    k_codes: Tensor,
    k_scale: Tensor,
    k_mean: Tensor | None,
    v_codes: Tensor,
    v_scale: Tensor,
    tail_k: Tensor,
    tail_v: Tensor,
    codebook_k: Tensor,
    codebook_v: Tensor,
    start: Tensor | None,
    length: Tensor,
    frozen: Tensor | None,
    window: int,
    key_scheme: VQScheme,
    value_scheme: VQScheme,
    key_layout: str,
    value_layout: str,
) -> None:
    """`ops.static_reference.store`; the codes of a token are those of `append`.

    Raises:
        VQFormatError: shapes, dtypes or memory are not those of a static cache.
    """
    if frozen is not None and not key_scheme.has_scale:  # of no scheme with a name
        return static_reference.store(
            keys, values, sink_k, sink_v, k_codes, k_scale, k_mean, v_codes, v_scale, tail_k,
            tail_v, codebook_k, codebook_v, start, length, frozen, window, key_scheme, value_scheme,
            key_layout, value_layout,
        )  # fmt: skip
    keys = keys if keys.stride(3) == 1 else keys.contiguous()
    values = values if values.stride(3) == 1 else values.contiguous()
    batch, heads, tokens, dim = keys.shape
    slots, capacity = tail_k.shape[2], k_codes.shape[2]
    if (
        values.shape[:3] != keys.shape[:3]
        or tail_v.shape[2] != slots
        or sink_v.shape[2] != sink_k.shape[2]
        or tokens + window > slots
        or length.dtype != torch.int64
        or (start is not None and (start.dtype != torch.int64 or start.shape != (batch,)))
        or (frozen is not None and (frozen.dtype != torch.bool or frozen.shape != (batch, heads)))
    ):
        raise VQFormatError(
            f"store got keys {list(keys.shape)} and values {list(values.shape)} for rings of "
            f"{slots} and {tail_v.shape[2]} tokens and a window of {window}."
        )
    if not keys.numel():
        return None
    grid_k, grid_v = grid_of(codebook_k, key_scheme), grid_of(codebook_v, value_scheme)
    key_side = _side(
        keys, tail_k, sink_k, k_mean, k_codes, k_scale, codebook_k, key_scheme, capacity, grid_k
    )
    value_side = _side(
        values, tail_v, sink_v, None, v_codes, v_scale, codebook_v, value_scheme, capacity, grid_v
    )
    ordinal = keys.device.index
    with torch.cuda.device(keys.device):
        kernel, across = _storer(
            (key_scheme, dim, keys.dtype, grid_k is not None),
            (value_scheme, values.shape[3], values.dtype, grid_v is not None),
            k_mean is not None, ordinal,
        )  # fmt: skip
        shares = shares_of(batch, heads * sum(across), device_arch(ordinal).sms)
        kernel(
            sum(heads * shares * blocks if blocks else batch * heads for blocks in across),
            torch._C._cuda_getCurrentRawStream(ordinal),
            *key_side,
            *value_side,
            None if start is None else start.data_ptr(),
            length.data_ptr(),
            None if frozen is None else frozen.data_ptr(),
            heads,
            batch * heads,
            tokens,
            sink_k.shape[2],
            slots,
            window,
            capacity,
            shares,
            dependent=True,
        )
    return None


STORE = Implementation(store, supports.store)
