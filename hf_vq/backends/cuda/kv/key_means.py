"""What a prompt decides of its keys, on a GPU: means and factors, in one launch each."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .... import dispatch
from ....codegen.families import key_means as plans
from ....codegen.jit.kernel_store import default_store
from ....codegen.jit.launch import LoadedKernel, Prepared
from ....codegen.packed import FLOAT, INT32, INT64, POINTER, Packed
from ....dispatch import Implementation
from ....errors import VQFormatError
from ....ops.rotary_mean import PromptMeans
from ... import refusals
from ..linear.dequantize import DTYPES, on_device

_ALIGNED = 16  # bytes of the widest load
_UNKNOWN = 2  # layout of pairs; others are `interleaved`

MEANS_ARGUMENTS = Packed([
    ("keys inv_freq sums decided found counters mean turning shown", POINTER),
    ("batch head token position", INT64),
    ("heads rows dim pairs tokens parts tokens_of_part layout together", INT32),
    ("strength", FLOAT),
])  # fmt: skip
"""struct Arguments of kernels/cuda/kv/key_means.cu."""
SMOOTHING_ARGUMENTS = Packed([
    ("queries keys mean turning shown sums counters factors", POINTER),
    ("query_batch query_head query_token key_batch key_head key_token", INT64),
    ("heads groups dim pairs tokens parts tokens_of_part interleaved", INT32),
])  # fmt: skip
"""struct Arguments of kernels/cuda/kv/key_smoothing.cu."""
_Means, _Smoothing = MEANS_ARGUMENTS.structure(), SMOOTHING_ARGUMENTS.structure()


@functools.lru_cache(maxsize=64)
def _means_kernel(dtype: torch.dtype, ordinal: int) -> Prepared:
    plan = plans.key_means_plan(DTYPES[dtype])
    return LoadedKernel(plan, _Means, ordinal, default_store()).prepare(1)


@functools.lru_cache(maxsize=64)
def _smoothing_kernel(dtype: torch.dtype, ordinal: int) -> Prepared:
    plan = plans.key_smoothing_plan(DTYPES[dtype])
    return LoadedKernel(plan, _Smoothing, ordinal, default_store()).prepare(1)


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
    mean = keys.new_empty(batch, heads, 1, dim, dtype=torch.float32)
    turning = torch.empty_like(mean)
    rows, (parts, each) = batch * heads, plans.split(tokens)
    counters = keys.new_zeros(rows + 1 + 2, dtype=torch.int32)
    shown = counters[rows + 1 :]
    if not keys.numel():
        shown[0] = bool(interleaved)
        return PromptMeans(mean.zero_(), turning.zero_(), shown)
    if inv_freq.ndim != 1 or 2 * len(inv_freq) > dim or inv_freq.device != keys.device:
        raise VQFormatError(
            f"keys [B, H, n, {dim}] on {keys.device} do not turn with frequencies "
            f"{list(inv_freq.shape)} on {inv_freq.device}."
        )
    keys = keys if keys.stride(3) == 1 else keys.contiguous()
    inv_freq = inv_freq.float().contiguous()
    sums = mean.new_empty(rows, parts, 4, dim)
    decided, found = mean.new_empty(rows, 2, 2, dim), mean.new_empty(rows, 2, 3)
    layout = _UNKNOWN if interleaved is None else int(interleaved)
    ordinal, size = keys.device.index, keys.element_size()
    with on_device(ordinal):
        kernel = _means_kernel(keys.dtype, ordinal)
        with kernel.lock:
            MEANS_ARGUMENTS.pack_into(
                kernel.arguments, 0,
                keys.data_ptr(), inv_freq.data_ptr(), sums.data_ptr(), decided.data_ptr(),
                found.data_ptr(), counters.data_ptr(), mean.data_ptr(), turning.data_ptr(),
                shown.data_ptr(),
                *(size * stride for stride in keys.stride()[:3]), first, heads, rows, dim,
                len(inv_freq), tokens, parts, each, layout, together, strength,
            )  # fmt: skip
            kernel.start(torch._C._cuda_getCurrentRawStream(ordinal), False, rows * parts)
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
    shape = batch, heads, 1, dim
    means = [mean] if turning is None else [mean, turning]
    if (
        query.shape != (batch, query.shape[1], tokens, dim)
        or query.shape[1] % heads
        or any(x.shape != shape or x.dtype != torch.float32 for x in means)
        or any(x.device != keys.device for x in (query, *means))
        or 2 * pairs > dim
    ):
        raise VQFormatError(
            f"queries {list(query.shape)} and means {[list(x.shape) for x in means]} of "
            f"{mean.dtype} do not smooth keys {list(keys.shape)} with {pairs} pairs."
        )
    if not keys.numel():
        return torch.ones_like(mean)
    if query.dtype != keys.dtype:
        query, keys = query.float(), keys.float()
    query, keys = _aligned(query), _aligned(keys)
    mean = mean.contiguous()
    turning = None if turning is None else turning.contiguous()
    rows, (parts, each) = batch * heads, plans.split(tokens)
    counters = keys.new_zeros(rows, dtype=torch.int32)
    sums, factors = mean.new_empty(rows, parts, 2, dim), torch.empty_like(mean)
    ordinal, size = keys.device.index, keys.element_size()
    there, interleaved = (shown, False) if isinstance(shown, Tensor) else (None, shown)
    with on_device(ordinal):
        kernel = _smoothing_kernel(keys.dtype, ordinal)
        with kernel.lock:
            SMOOTHING_ARGUMENTS.pack_into(
                kernel.arguments, 0,
                query.data_ptr(), keys.data_ptr(), mean.data_ptr(),
                0 if turning is None else turning.data_ptr(),
                0 if there is None else there.data_ptr(), sums.data_ptr(), counters.data_ptr(),
                factors.data_ptr(), *(size * x.stride(i) for x in (query, keys) for i in range(3)),
                heads, query.shape[1] // heads, dim, pairs, tokens, parts, each, interleaved,
            )  # fmt: skip
            kernel.start(torch._C._cuda_getCurrentRawStream(ordinal), False, rows * parts)
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
