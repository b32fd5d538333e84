"""Attention of many queries over a coded cache on a GPU: `Maths` of `torch_attention`, but faster.

Codes are decoded by one generated kernel (dequantize_kv.cu) straight to the dtype of the query, and
attended to by those of PyTorch's kernels that also return the logarithm of the sum: cuDNN's for
many queries on Hopper, else flash attention's, and CUTLASS's ("efficient") for masks and for keys
and values of two sizes. What needs float32 (soft-caps, additive masks) is left to plain products.

Per token and kv head, u4, D = 128, n query heads: 132 bytes are read and 512 written and read
again, for 4 n Q D operations, which bound it from some hundred queries on.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....codegen.families.dequantize import rotatable
from ....codegen.families.kv_prefill import blocks, decodable_kv, decode_kv_plan, merge_plan
from ....codegen.jit.kernel_store import default_store
from ....codegen.jit.launch import LoadedKernel
from ....codegen.kv_plan import DecodeKVPlan, MergePlan
from ....dispatch import Implementation, bucket
from ....errors import VQFormatError
from ....formats.packing import packed_size
from ....formats.scheme import VQScheme
from ....formats.stored_weight import StoredWeight
from ....ops.kv import KVCacheView, KVSide
from ....ops.reference.codes import in_dtype
from ...torch import kv_attention as torch_attention
from ...torch.kv_attention import WHOLE_TOKENS
from ...torch.masks import remembered
from ...torch.partial_softmax import Maths, Part, stored
from ..linear.dequantize import DTYPES, _ready
from ..linear.dequantize import rotate as _rotate
from . import supports

_aten = torch.ops.aten
_FAST_DTYPES = (torch.float16, torch.bfloat16)
_LARGEST_HEAD, _LARGEST_CUDNN_HEAD = 256, 128  # cuDNN's, in all versions
_ALIGNED = 8  # numbers, of all kernels
_MANY_QUERIES = 8192  # of all heads: fewer do not fill the GPU, unless tokens are split too
_SIZES, _SMALLEST_UNIT = 16, 128


class DecodeKVArguments(ctypes.Structure):
    """struct Arguments of kernels/cuda/kv/dequantize_kv.cu."""

    _fields_ = [
        ("codes", ctypes.c_void_p),
        ("codebook", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("mean", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("codes_row", ctypes.c_int64),
        ("codes_head", ctypes.c_int64),
        ("scale_row", ctypes.c_int64),
        ("scale_head", ctypes.c_int64),
        ("heads", ctypes.c_int32),
        ("tokens", ctypes.c_int32),
    ]


_Pointers: Any = ctypes.c_void_p * MergePlan.MOST_PARTS


class MergeArguments(ctypes.Structure):
    """struct Arguments of kernels/cuda/kv/softmax_merge.cu."""

    _fields_ = [
        ("out", _Pointers),
        ("lse", _Pointers),
        ("s_aux", ctypes.c_void_p),
        ("result", ctypes.c_void_p),
        ("coded", ctypes.c_int32),
        ("parts", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("queries", ctypes.c_int32),
        ("rows", ctypes.c_int32),
    ]


@functools.lru_cache(maxsize=256)
def _decoder(
    scheme: VQScheme, head_dim: int, dtype: torch.dtype, ordinal: int
) -> tuple[LoadedKernel, DecodeKVPlan]:
    plan = decode_kv_plan(scheme, head_dim, DTYPES[dtype])
    return LoadedKernel(plan, DecodeKVArguments, ordinal, default_store()), plan


def _side_by_side(x: Tensor) -> Tensor:
    """[B, H, n, m] with the tokens of a head side by side."""
    dense = x.stride(3) == 1 and x.stride(2) == x.shape[3]
    return x if dense or x.shape[2] == 1 else x.contiguous()


def decode(
    codes: Tensor,
    scale: Tensor,
    codebook: Tensor,
    mean: Tensor | None,
    scheme: VQScheme,
    head_dim: int,
    dtype: torch.dtype,
) -> Tensor:
    """Keys or values that are `decodable_kv`, rotated still: [B, H, n, head_dim]. On the current
    device.

    Args:
        codes: canonical rows uint8 [B, H, n, bytes].
        scale: fp16 [B, H, n, 1], or [B, H, n, 0] without scales, or [B, H, n, 2] with zeros.
        codebook: fp16 [1, entries, x], or [H, head_dim / x, entries, x].
        mean: float32 [B, H, 1, head_dim], rotated too; None = 0.
        dtype: of the result.

    Raises:
        VQFormatError: sizes do not belong together. A kernel would read what is not there.
    """
    batch, heads, tokens, _ = codes.shape
    token = codes.shape[3], scale.shape[3], codebook.shape
    if token != _sizes(scheme, heads, head_dim) or scale.shape[:3] != codes.shape[:3]:
        raise VQFormatError(
            f"{scheme.spec()} of {heads} heads of {head_dim} has bytes, scales and codebooks "
            f"{_sizes(scheme, heads, head_dim)}; got {token} of {list(codes.shape)} codes."
        )
    out = codes.new_empty(batch, heads, tokens, head_dim, dtype=dtype)
    if not out.numel():
        return out
    codes, scale = _side_by_side(codes), _side_by_side(scale)
    codebook = _ready(codebook, torch.float16)
    mean = None if mean is None else _ready(mean, torch.float32)
    ordinal = out.device.index
    kernel, plan = _decoder(scheme, head_dim, dtype, ordinal)
    kernel(
        blocks(plan, batch * heads, tokens),
        torch._C._cuda_getCurrentRawStream(ordinal),
        codes.data_ptr(),
        codebook.data_ptr(),
        scale.data_ptr(),
        None if mean is None else mean.data_ptr(),
        out.data_ptr(),
        *codes.stride()[:2],
        *scale.stride()[:2],
        heads,
        tokens,
    )
    return out


@functools.lru_cache(maxsize=256)
def _sizes(scheme: VQScheme, heads: int, head_dim: int) -> tuple[int, int, tuple[int, ...]]:
    """Bytes and numbers of a token, and the shape of its codebooks."""
    groups = head_dim // scheme.vector_size
    books = (heads, groups) if scheme.codebook == "channel_group" else (1,)
    width = packed_size(groups, scheme.entry_bits)
    return width, scheme.row_numbers, (*books, scheme.entries, scheme.vector_size)


@functools.lru_cache(maxsize=64)
def _merger(
    scheme: VQScheme, dim: int, dtype: torch.dtype, ordinal: int
) -> tuple[LoadedKernel, MergePlan]:
    plan = merge_plan(scheme, dim, DTYPES[dtype])
    return LoadedKernel(plan, MergeArguments, ordinal, default_store()), plan


def merge(
    coded: Sequence[Part],
    others: Sequence[Part],
    sink_logits: Tensor | None,
    scheme: VQScheme,
    dtype: torch.dtype,
) -> Tensor:
    """`Maths.merge` of parts of `dtype`, at most `MergePlan.MOST_PARTS`. On the
    current device."""
    parts = [(out.contiguous(), lse.contiguous()) for out, lse in (*coded, *others)]
    batch, heads, queries, dim = parts[0][0].shape
    # As models want it, who transpose what they get.
    result = parts[0][0].new_empty(batch, queries, heads, dim)
    ordinal = result.device.index
    sink_logits = None if sink_logits is None else sink_logits.float().contiguous()
    kernel, plan = _merger(scheme, dim, dtype, ordinal)
    kernel(
        -(-batch * heads * queries // plan.rows),
        torch._C._cuda_getCurrentRawStream(ordinal),
        _Pointers(*(out.data_ptr() for out, _ in parts)),
        _Pointers(*(lse.data_ptr() for _, lse in parts)),
        None if sink_logits is None else sink_logits.data_ptr(),
        result.data_ptr(),
        len(coded),
        len(parts),
        heads,
        queries,
        batch * heads * queries,
    )
    return result.transpose(1, 2)


def _flash(query: Tensor, keys: Tensor, values: Tensor, softmax_scale: float, causal: bool) -> Part:
    """Heads of equal size; `causal` where there are as many keys as queries."""
    out, lse = _aten._scaled_dot_product_flash_attention(
        query, keys, values, 0.0, causal, False, scale=softmax_scale
    )[:2]
    return out, lse


@functools.lru_cache(maxsize=64)
def _has_fast_cudnn(ordinal: int) -> bool:
    hopper = torch.cuda.get_device_capability(ordinal) >= (9, 0)
    return hopper and torch.backends.cudnn.is_available()


def _cudnn(query: Tensor, keys: Tensor, values: Tensor, softmax_scale: float) -> Part:
    """On Hopper more than twice as fast as flash attention, but every new size costs 50 ms: so
    queries, those of a kv head side by side, are filled up to one of a few numbers."""
    batch, heads, queries, _ = query.shape
    rows = heads // keys.shape[1] * queries
    unit = max(bucket(rows) // _SIZES, _SMALLEST_UNIT)
    grouped = query.reshape(batch, keys.shape[1], rows, -1)
    if rows % unit:
        grouped = torch.nn.functional.pad(grouped, (0, 0, 0, -rows % unit))
    out, lse = _aten._scaled_dot_product_cudnn_attention(
        grouped, keys, values, None, True, 0.0, False, False, scale=softmax_scale
    )[:2]
    shape = (batch, heads, queries)
    return out[:, :, :rows].reshape(*shape, -1), lse.flatten(2)[:, :, :rows].reshape(shape)


def _bias(mask: Tensor, queries: int, dtype: torch.dtype) -> Tensor:
    """What is added to logits for a mask: [B or 1, Hq or 1, Q, n]. Rows are padded, as kernels want
    it."""
    width = -(-mask.shape[3] // _ALIGNED) * _ALIGNED
    bias = torch.zeros(*mask.shape[:2], queries, width, dtype=dtype, device=mask.device)
    bias[..., : mask.shape[3]].masked_fill_(~mask, -torch.inf)
    return bias


def _efficient(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    softmax_scale: float,
    mask: Tensor | None,
    causal: bool,
    blind: bool,
) -> Part:
    """Any sizes of heads, and masks: bool [B or 1, Hq or 1, Q or 1, n]."""
    batch, heads, queries, _ = query.shape
    kv_heads, count = keys.shape[1:3]
    groups = heads // kv_heads
    # A kv head is a row of the batch: its keys are read where they are by all query heads.
    query = query.reshape(batch * kv_heads, groups, queries, -1)
    keys, values = (
        x.reshape(batch * kv_heads, 1, count, -1).expand(-1, groups, -1, -1) for x in (keys, values)
    )
    bias = None
    if mask is not None:
        bias = remembered(mask, _bias, queries, query.dtype)
        if bias.shape[0] == bias.shape[1] == 1:
            bias = bias.expand(batch * kv_heads, groups, -1, -1)
        else:
            bias = bias.expand(batch, heads, -1, -1).reshape(*query.shape[:3], -1)
        bias = bias[..., :count]
    out, lse = _aten._scaled_dot_product_efficient_attention(
        query, keys, values, bias, True, 0.0, causal, scale=softmax_scale
    )[:2]
    lse = lse[..., :queries].reshape(batch, heads, queries)
    if mask is not None and blind:  # the kernel says 0
        lse = lse.masked_fill(~mask.any(-1), -torch.inf)
    return out.reshape(batch, heads, queries, -1), lse


class _Maths(Maths):
    def decode(self, side: KVSide, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        if decodable_kv(side.parsed, side.dim):
            return in_dtype(super().decode(side, begin, end, dtype), dtype)
        codes, scale = stored(side, begin, end)
        return decode(codes, scale, side.codebook, side.mean, side.parsed, side.dim, dtype)

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        softmax_scale: float,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        blind: bool = False,
        softcap: float = 0.0,
    ) -> Part:
        exact = softcap or (mask is not None and mask.dtype != torch.bool)
        same = query.dtype == keys.dtype == values.dtype and query.dtype in _FAST_DTYPES
        dims = keys.shape[3], values.shape[3]
        if exact or not same or max(dims) > _LARGEST_HEAD or any(dim % _ALIGNED for dim in dims):
            return super().attend(
                query, keys, values, softmax_scale,
                mask=mask, causal=causal, softcap=softcap,
            )  # fmt: skip
        many = query.shape[:3].numel() >= _MANY_QUERIES and keys.shape[2] % WHOLE_TOKENS == 0
        many = many and not causal and max(dims) <= _LARGEST_CUDNN_HEAD
        many = many and torch.backends.cuda.cudnn_sdp_enabled()  # users may turn it off
        if mask is not None:
            return _efficient(query, keys, values, softmax_scale, mask, causal, blind)
        if many and _has_fast_cudnn(query.device.index):
            return _cudnn(query, keys, values, softmax_scale)
        if dims[0] == dims[1]:
            return _flash(query, keys, values, softmax_scale, causal)
        return _efficient(query, keys, values, softmax_scale, None, causal, blind)

    def rotate(self, x: Tensor, scheme: VQScheme, inverse: bool = False) -> Tensor:
        if rotatable(scheme, x.shape[-1]):
            return super().rotate(x, scheme, inverse)
        return _rotate(x, None, scheme, inverse)

    def merge(
        self,
        coded: Sequence[Part],
        others: Sequence[Part],
        sink_logits: Tensor | None,
        scheme: VQScheme,
        dtype: torch.dtype,
    ) -> Tensor:
        parts = [*coded, *others]
        dim = others[0][0].shape[3]
        if (
            any(out.dtype != dtype for out, _ in parts)
            or len(parts) > MergePlan.MOST_PARTS
            or decodable_kv(scheme, dim)
            or dim > MergePlan.LARGEST_DIM
        ):
            return super().merge(coded, others, sink_logits, scheme, dtype)
        return merge(coded, others, sink_logits, scheme, dtype)


_MATHS = _Maths()


def attention(query: Tensor, view: KVCacheView, *options: Any) -> Tensor:
    """Attention over a growing cache, as `torch_attention.attention`."""
    with torch.cuda.device(query.device):
        return torch_attention.attention(query, view, *options, maths=_MATHS)


def _decode_rows(weight: StoredWeight) -> Tensor:
    """Rows of integers (`ops.reference.decode`): [..., length] float32."""
    (codes, codebook, scale, _), _, scheme, length = weight
    stored = codes.reshape(1, 1, -1, codes.shape[-1]), scale.reshape(1, 1, -1, scale.shape[-1])
    with torch.cuda.device(codes.device):
        rows = decode(*stored, codebook, None, scheme, length, torch.float32)
    return rows.view(*codes.shape[:-1], length)


ATTENTION = Implementation(attention, torch_attention.supports)
DECODE = Implementation(_decode_rows, supports.decode_integers)
