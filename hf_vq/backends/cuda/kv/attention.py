"""`kv_attention` of few queries on a GPU: one launch over the codes (attention.cu)."""

from __future__ import annotations

import functools
import math
import threading
import weakref

import torch
from torch import Tensor

from ....codegen.attention_plan import PAGE, PIECE, TOKENS, AttentionPlan, Mask
from ....codegen.families.kv_attention import (
    AttentionProblem,
    choose,
    group_bucket,
    splits,
    token_bucket,
)
from ....codegen.jit.device import device_arch
from ....codegen.jit.kernel_store import default_store
from ....codegen.jit.launch import LoadedKernel, Prepared
from ....codegen.jit.memory import zeros
from ....codegen.packed import FLOAT, INT32, INT64, POINTER, UINT32, Packed
from ....dispatch import Implementation
from ....errors import VQBackendError
from ....formats.packing import packed_size
from ....formats.scheme import VQScheme
from ....ops.kv import KVCacheView
from ..linear.dequantize import DTYPES, on_device
from . import supports
from .append import mean_and_smoothing
from .codebooks import KEYS, VALUES, tables
from .rotary_mean import ROTARY_MEAN, rotary_mean

FLOATS = Packed([("at", POINTER), ("row head token", INT64)])
CODED = Packed([
    ("codes scale codebook", POINTER), ("row head scale_row scale_head first", INT64),
])  # fmt: skip
ARGUMENTS = Packed([
    ("query sink_k sink_v tail_k tail_v", FLOATS), ("keys values", CODED),
    ("mean smoothing", POINTER), ("mean_row mean_head", INT64), ("start mask", POINTER),
    ("mask_row mask_head mask_query", INT64),
    ("nothing length pages out partial arrived", POINTER),
    ("kv_heads groups queries sinks tail_start tail_slots window fresh coded across splits table",
     INT32),
    ("inverse_across inverse_heads inverse_splits inverse_queries", UINT32),
    ("settled", INT32), ("scaling softcap", FLOAT),
])  # fmt: skip
"""Structs of kernels/cuda/kv/attention/attention_arguments.cuh: Floats, Coded, Arguments."""
_WITH_ROTARY = Packed([("arguments", ARGUMENTS), ("rotary", ROTARY_MEAN)])
_LOG2_E = math.log2(math.e)
_USUAL = 4  # times shorter than the longest that there may be, requests usually are
AttentionArguments, _RotaryArguments = ARGUMENTS.structure(), _WITH_ROTARY.structure()
_MASKS = {torch.bool: Mask.BOOL, **{dtype: Mask(kind.value) for dtype, kind in DTYPES.items()}}


class _Counters:
    """Numbers that are zero whenever no kernel that uses them runs: kernels leave them so.

    Launches that may run at the same time have counters of their own: those of each stream, and
    every launch that a graph captures.
    """

    ROOM, OF_STREAM = 1 << 20, 4096  # counters that are allocated at once, and given to a stream

    def __init__(self, ordinal: int) -> None:
        self.ordinal, self.free, self.left = ordinal, 0, 0
        self.of_stream: dict[int, tuple[int, int]] = {}
        self.lock = threading.Lock()

    def take(self, count: int, stream: int) -> int:
        """The address of `count` of them for a launch on a stream."""
        capturing = torch.cuda.is_current_stream_capturing()
        with self.lock:
            address, room = self.of_stream.get(stream, (0, 0))
            if room >= count and not capturing:
                return address
            count = count if capturing else max(count, self.OF_STREAM)
            if self.left < count:
                room = max(count, self.ROOM)
                self.free, self.left = zeros(4 * room, self.ordinal), room
            address, self.free, self.left = self.free, self.free + 4 * count, self.left - count
            if not capturing:
                self.of_stream[stream] = address, count
            return address


@functools.cache
def _counters(ordinal: int) -> _Counters:
    return _Counters(ordinal)


@functools.lru_cache(maxsize=1024)
def _kernel(plan: AttentionPlan, ordinal: int) -> LoadedKernel:
    arguments = _RotaryArguments if plan.rotary else AttentionArguments
    return LoadedKernel(plan, arguments, ordinal, default_store())


@functools.lru_cache(maxsize=1024)
def _launch(
    key: VQScheme,
    value: VQScheme,
    key_dim: int,
    value_dim: int,
    columns: int,
    dtype: torch.dtype,
    mask: Mask,
    softcapped: bool,
    tokens: int,
    page: int,
    groups: int,
    rotary: bool,
    ordinal: int,
) -> tuple[AttentionPlan, Prepared]:
    arch = device_arch(ordinal)
    asked = AttentionProblem(
        key, value, key_dim, value_dim, columns, DTYPES[dtype], mask, softcapped, tokens, arch,
        page, groups, rotary,
    )  # fmt: skip
    plan = choose(asked)
    if plan is None:
        raise VQBackendError(
            f"no plan for {asked}: shared memory or registers do not suffice. Use a universal "
            "scheme such as u4, and please report it."
        )
    return plan, _kernel(plan, ordinal).prepare(1)


def _strides(x: Tensor) -> tuple[int, int, int, int]:
    row, head, token, _ = x.stride()
    return x.data_ptr(), row, head, token


def _dense(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` [B, H, n, D] as the kernel reads it: numbers of a token from an aligned address on."""
    x = x.to(dtype)
    strides = x.stride()
    aligned = x.data_ptr() % 16 == 0 and not any(stride % 8 for stride in strides[:3])
    return x if strides[3] == 1 and aligned else x.clone(memory_format=torch.contiguous_format)


def attention(
    query: Tensor,
    view: KVCacheView,
    mask: Tensor | None,
    sink_logits: Tensor | None,
    softmax_scale: float,
    softcap: float,
    plan: AttentionPlan | None = None,
    split: int = 0,
) -> Tensor:
    """Attention over a coded cache; arguments as in `ops.kv_ops`.

    Args:
        plan: instead of the one that would be chosen.
        split: blocks among which tokens are split, instead of what would be chosen.

    Raises:
        VQBackendError: pages do not lie as a kernel reads them.
    """
    key, value, table = view.key, view.value, view.page_table
    rows, heads, queries, key_dim = query.shape
    kv_heads, value_dim = key.heads, value.dim
    dtype, ordinal = query.dtype, query.get_device()
    length, new, coded = view.cache_seqlens, view.num_new, view.num_coded
    mean, smoothing = mean_and_smoothing(key)
    start = view.recent_start if length is None else 0
    if table is not None:
        _check_pages(view)
        coded = view.max_seqlen
        mean, smoothing = (
            None if each is None else each.expand(rows, -1, -1, -1) for each in (mean, smoothing)
        )
    elif length is not None:
        new, coded = queries, key.codes.shape[2]
    out = query.new_empty(rows, heads, queries, value_dim)
    if not out.numel():
        return out
    with on_device(ordinal):
        query = _dense(query, dtype)
        if table is None:
            floats = key.sinks, value.sinks, key.recent, value.recent
            codes = _dense_tokens(key.codes), _dense_tokens(value.codes)
            scales = _dense_tokens(key.scale), _dense_tokens(value.scale)
        else:
            floats = (query[:, :kv_heads, :0],) * 4
            codes, scales = (key.codes, value.codes), (key.scale, value.scale)
        sink_k, sink_v, recent_k, recent_v = (_dense(x, dtype) for x in floats)
        columns = heads // kv_heads * queries
        kind = Mask.NONE
        masked: tuple[int, ...] = (0, 0, 0, 0)
        if mask is not None:
            mask = mask if mask.dtype in _MASKS else mask.float()
            mask = mask if mask.stride(-1) == 1 else mask.contiguous()
            kind = _MASKS[mask.dtype]
            mask = mask.expand(rows, heads, queries, mask.shape[-1])
            size = mask.element_size()
            masked = (mask.data_ptr(), *(stride * size for stride in mask.stride()[:3]))
        if plan is None:
            plan, prepared = _launch(
                key.parsed, value.parsed, key_dim, value_dim, columns, dtype, kind, softcap > 0,
                token_bucket(coded if table is None else coded // _USUAL), view.page_size,
                group_bucket(rows * kv_heads), view.key_rotary_mean is not None, ordinal,
            )  # fmt: skip
        else:
            prepared = _kernel(plan, ordinal).prepare(1)
        across = -(-columns // plan.queries)
        groups = rows * kv_heads * across
        count = split or splits(plan, groups, -(-coded // TOKENS), device_arch(ordinal))
        stream = torch._C._cuda_getCurrentRawStream(ordinal)
        codebooks = key.codebook, value.codebook
        if plan.key_learned:
            codebooks = tables(codebooks[0], key.parsed, KEYS), codebooks[1]
        if plan.value_learned:
            codebooks = codebooks[0], tables(codebooks[1], value.parsed, VALUES)
        partial, arrived = None, 0
        if count > 1:
            size = groups * count * plan.partial_floats
            partial = torch.empty(size, dtype=torch.float32, device=query.device)
            arrived = _counters(ordinal).take(groups, stream)
        strides = (0, 0) if mean is None else mean.stride()[:2]
        means = _address(mean), _address(smoothing), *strides
        nothing = None if sink_logits is None else sink_logits.float().contiguous()
        with prepared.lock:
            ARGUMENTS.pack_into(
                prepared.arguments, 0,
                *_strides(query), *_strides(sink_k), *_strides(sink_v), *_strides(recent_k),
                *_strides(recent_v),
                *_coded(codes[0], scales[0], codebooks[0]), key.first,
                *_coded(codes[1], scales[1], codebooks[1]), value.first,
                *means, _address(view.cache_leftpad), *masked, _address(nothing), _address(length),
                _address(table), out.data_ptr(), _address(partial), arrived,
                kv_heads, heads // kv_heads, queries, sink_k.shape[2], start, recent_k.shape[2],
                view.window, new, coded, across, count, 0 if table is None else table.stride(0),
                _inverse(across), _inverse(kv_heads), _inverse(count), _inverse(queries),
                coded > 0 and _settled(codebooks, stream), softmax_scale * _LOG2_E,
                softcap * _LOG2_E,
            )  # fmt: skip
            if plan.rotary:
                ROTARY_MEAN.pack_into(prepared.arguments, ARGUMENTS.size, *rotary_mean(view))
            prepared.start(stream, True, groups * count)
    return out


def _dense_tokens(x: Tensor) -> Tensor:
    """`x` [B, H, tokens, n] with tokens side by side."""
    return x if x.stride(2) == x.shape[3] and x.stride(3) == 1 else x.contiguous()


def _check_pages(view: KVCacheView) -> None:
    """Raise unless all have the sizes that codes of such heads have, steps of tokens lie in one
    page, side by side, at multiples of 16 bytes, and all parts of a page are as far from those of
    the next."""
    shape, apart = view.key.codes.shape[:3], view.key.codes.stride(0)
    for side in (view.key, view.value):
        code, scale, scheme = side.codes, side.scale, side.parsed
        vectors, numbers, tokens = side.dim // scheme.vector_size, scheme.row_numbers, shape[2]
        width = packed_size(vectors, scheme.entry_bits)
        books = (1,) if scheme.has_scale else (shape[1], vectors)
        if (
            code.shape != (*shape, width)
            or scale.shape != (*shape, numbers)
            or side.codebook.shape != (*books, scheme.entries, scheme.vector_size)
            or code.stride()[1:] != (tokens * width, width, 1)
            or scale.stride()[1:] != (tokens * numbers, numbers, 1)
            or (code.stride(0), 2 * scale.stride(0)) != (apart, apart)
            or tokens % PAGE
            or apart % PIECE
            or code.data_ptr() % PIECE
            or scale.data_ptr() % PIECE
        ):
            raise VQBackendError(
                f"no kernel reads pages of {tokens} tokens of {side.scheme} with heads of "
                f"{side.dim}: codes {list(code.shape)}, {list(code.stride())} apart, scales "
                f"{list(scale.shape)}, {list(scale.stride())} apart, and a codebook "
                f"{list(side.codebook.shape)}; `serving.pages` lays them out."
            )
    table, length = view.page_table, view.cache_seqlens
    assert table is not None and length is not None
    known = table.dtype == torch.int32 and length.dtype == torch.int64
    if not (known and table.stride(1) == 1 and length.is_contiguous()):
        raise VQBackendError("a table of pages is int32 [B, width], rows dense; lengths are int64.")


_seen: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}


def _forget(key: int, _: weakref.ref[Tensor]) -> None:
    _seen.pop(key, None)


def _settled(known: tuple[Tensor, ...], stream: int) -> bool:
    """Whether a launch on the stream read these codebooks before, and nobody wrote them since."""
    settled = True
    for book in known:
        if book.is_inference():  # counts no writes
            return False
        key, now = id(book), book._version
        seen = _seen.get(key)
        same = seen is not None and seen[0]() is book and seen[1] == now
        if seen and same and (seen[2] == stream or torch.cuda.is_current_stream_capturing()):
            continue
        settled = False
        _seen[key] = weakref.ref(book, functools.partial(_forget, key)), now, stream
    return settled


@functools.cache
def _inverse(divisor: int) -> int:
    return 0 if divisor == 1 else -(-(1 << 32) // divisor)


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _coded(codes: Tensor, scale: Tensor, codebook: Tensor) -> tuple[int, ...]:
    """The fields of `struct Coded`, but for the last."""
    of_codes, of_scale = codes.stride(), scale.stride()
    return (
        codes.data_ptr(), scale.data_ptr(), codebook.data_ptr(), of_codes[0], of_codes[1],
        of_scale[0], of_scale[1],
    )  # fmt: skip


ATTENTION = Implementation(attention, supports.attention)
