"""What a prompt decides of its keys, on a GPU: means and factors, in one launch each."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from .... import dispatch
from ....codegen.families import key_means as plans
from ....codegen.jit.kernel_store import default_store
from ....codegen.jit.launch import LoadedKernel
from ....dispatch import Implementation
from ....ops.rotary_mean import HALVES, NEIGHBOURS, PromptMeans
from ... import refusals
from ..linear.dequantize import DTYPES, on_device

_ALIGNED = 16  # bytes of the widest load
_UNKNOWN = 2  # layout of pairs


class KeyMeansArguments(ctypes.Structure):
    """struct Arguments of kernels/cuda/kv/key_means.cu."""

    _fields_ = [
        ("keys", ctypes.c_void_p),
        ("inv_freq", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("counters", ctypes.c_void_p),
        ("mean", ctypes.c_void_p),
        ("turning", ctypes.c_void_p),
        ("shown", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("token", ctypes.c_int64),
        ("position", ctypes.c_int64),
        ("heads", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("dim", ctypes.c_int32),
        ("pairs", ctypes.c_int32),
        ("tokens", ctypes.c_int32),
        ("parts", ctypes.c_int32),
        ("tokens_of_part", ctypes.c_int32),
        ("layout", ctypes.c_int32),
        ("together", ctypes.c_int32),
        ("strength", ctypes.c_float),
    ]


class KeySmoothingArguments(ctypes.Structure):
    """struct Arguments of kernels/cuda/kv/key_smoothing.cu."""

    _fields_ = [
        ("queries", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("mean", ctypes.c_void_p),
        ("turning", ctypes.c_void_p),
        ("shown", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("counters", ctypes.c_void_p),
        ("factors", ctypes.c_void_p),
        ("query_batch", ctypes.c_int64),
        ("query_head", ctypes.c_int64),
        ("query_token", ctypes.c_int64),
        ("key_batch", ctypes.c_int64),
        ("key_head", ctypes.c_int64),
        ("key_token", ctypes.c_int64),
        ("heads", ctypes.c_int32),
        ("groups", ctypes.c_int32),
        ("dim", ctypes.c_int32),
        ("pairs", ctypes.c_int32),
        ("tokens", ctypes.c_int32),
        ("parts", ctypes.c_int32),
        ("tokens_of_part", ctypes.c_int32),
        ("interleaved", ctypes.c_int32),
    ]


@functools.lru_cache(maxsize=64)
def _means_kernel(dtype: torch.dtype, ordinal: int) -> LoadedKernel:
    plan = plans.key_means_plan(DTYPES[dtype])
    return LoadedKernel(plan, KeyMeansArguments, ordinal, default_store())


@functools.lru_cache(maxsize=64)
def _smoothing_kernel(dtype: torch.dtype, ordinal: int) -> LoadedKernel:
    plan = plans.key_smoothing_plan(DTYPES[dtype])
    return LoadedKernel(plan, KeySmoothingArguments, ordinal, default_store())


def prompt_means(
    keys: Tensor,
    first: int,
    inv_freq: Tensor,
    interleaved: bool | None,
    strength: float = 0.0,
    together: int = 1,
) -> PromptMeans:
    """`ops.reference.key_means.prompt_means`; nothing waits for the device."""
    batch, heads, tokens, dim = keys.shape
    mean, turning = (
        keys.new_empty(batch, heads, 1, dim, dtype=torch.float32) for _ in ("stands", "turns")
    )
    rows, (parts, each) = batch * heads, plans.split(tokens)
    counters = keys.new_zeros(rows + 1 + batch + 2, dtype=torch.int32)
    shown = counters[rows + 1 + batch :]
    if not keys.numel():
        shown[0] = bool(interleaved)
        return PromptMeans(mean.zero_(), turning.zero_(), shown)
    keys = keys if keys.stride(3) == 1 else keys.contiguous()
    inv_freq = inv_freq.float().contiguous()
    sums = mean.new_empty(rows, parts, 4, dim)
    layouts = {False: HALVES, True: NEIGHBOURS, None: _UNKNOWN}
    ordinal, size = keys.device.index, keys.element_size()
    with on_device(ordinal):
        _means_kernel(keys.dtype, ordinal)(
            rows * parts, torch._C._cuda_getCurrentRawStream(ordinal),
            keys.data_ptr(), inv_freq.data_ptr(), sums.data_ptr(), counters.data_ptr(),
            mean.data_ptr(), turning.data_ptr(), shown.data_ptr(),
            *(size * stride for stride in keys.stride()[:3]), first, heads, rows, dim,
            len(inv_freq), tokens, parts, each, layouts[interleaved], together, strength,
        )  # fmt: skip
    return PromptMeans(mean, turning, shown)


def prompt_smoothing(
    query: Tensor,
    keys: Tensor,
    mean: Tensor,
    turning: Tensor | None,
    pairs: int,
    shown: Tensor | bool,
) -> Tensor:
    """`ops.reference.key_means.prompt_smoothing`; nothing waits for the device."""
    batch, heads, tokens, dim = keys.shape
    if not keys.numel():
        return torch.ones_like(mean)
    query, keys = _aligned(query.to(keys.dtype)), _aligned(keys)
    mean = mean.contiguous()
    turning = None if turning is None else turning.contiguous()
    rows, (parts, each) = batch * heads, plans.split(tokens)
    counters = keys.new_zeros(rows, dtype=torch.int32)
    sums, factors = mean.new_empty(rows, parts, 2, dim), torch.empty_like(mean)
    ordinal, size = keys.device.index, keys.element_size()
    there, interleaved = (shown, False) if isinstance(shown, Tensor) else (None, shown)
    with on_device(ordinal):
        _smoothing_kernel(keys.dtype, ordinal)(
            rows * parts, torch._C._cuda_getCurrentRawStream(ordinal),
            query.data_ptr(), keys.data_ptr(), mean.data_ptr(),
            None if turning is None else turning.data_ptr(),
            None if there is None else there.data_ptr(), sums.data_ptr(), counters.data_ptr(),
            factors.data_ptr(), *(size * x.stride(i) for x in (query, keys) for i in range(3)),
            heads, query.shape[1] // heads, dim, pairs, tokens, parts, each,
            interleaved,
        )  # fmt: skip
    return factors


def _aligned(x: Tensor) -> Tensor:
    """Rows [B, H, n, D] as the kernel reads them, 16 bytes at a time; itself, if it can."""
    size = x.element_size()
    dense = x.stride(3) == 1 and not any(size * stride % _ALIGNED for stride in x.stride()[:3])
    if dense and x.data_ptr() % _ALIGNED == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _means(problem: dispatch.KeyMeansProblem) -> str | None:
    reason = refusals.dtype(problem.dtype, refusals.FLOATS, "keys")
    return reason or plans.measurable(problem.head_dim)


def _smoothing(problem: dispatch.KeySmoothingProblem) -> str | None:
    reason = refusals.dtype(problem.dtype, refusals.FLOATS, "keys")
    return reason or plans.smoothable(problem.head_dim)


MEANS = Implementation(prompt_means, _means)
SMOOTHING = Implementation(prompt_smoothing, _smoothing)
