"""`kv_append` and `kv_attention` on the CPU: a KV cache by libhf_vq_cpu (`kernels/cpu/api.h`).

Of a static cache `kv_static` makes a growing one, as a host may read how many tokens there are.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ... import dispatch
from ...codegen.packed import FLOAT, INT32, INT64, POINTER, Packed
from ...dispatch import Implementation
from ...errors import VQBackendError, VQSchemeError
from ...formats.scheme import VQScheme
from ...ops.kv import PAGED, STATIC, KVCacheView, KVSide, append_index
from ...ops.layout import BLOCK_BITS, PLANES, QUADS
from ...ops.library import parse
from .. import refusals
from . import boxed_ops, kv_static, rotary_table
from . import library as native

LARGEST_DIM = 256
VECTOR_SIZES = (1, 2, 4)
_FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16)

CODES = Packed([
    ("data scale codebook mean smoothing rotary_mean rotary_table", POINTER),
    ("data_stride.0 data_stride.1 scale_stride.0 scale_stride.1 mean_stride.0 mean_stride.1",
     INT64),
    ("rotary_stride.0 rotary_stride.1", INT64),
    ("first count rotary_start", INT64), ("layout x bits learned dim block", INT32),
])  # fmt: skip
FLOATS = Packed([
    ("data", POINTER), ("stride.0 stride.1 stride.2 tokens", INT64), ("dtype", INT32),
])  # fmt: skip
STEP = Packed([
    ("k v", CODES), ("sink_k sink_v tail_k tail_v query", FLOATS),
    ("out", POINTER), ("out_stride.0 out_stride.1 out_stride.2", INT64), ("start mask", POINTER),
    ("mask_stride.0 mask_stride.1 mask_stride.2", INT64), ("s_aux", POINTER),
    ("batch heads group queries tail_start window fresh", INT64),
    ("mask_dtype", INT32), ("scaling softcap", FLOAT),
])  # fmt: skip
"""Structs of kernels/cpu/api.h: hf_vq_codes, hf_vq_floats, hf_vq_attention_step."""
_LAYOUTS = {QUADS: 1, PLANES: 2}
_Kept = list[Tensor | None]


def key_layout(scheme: VQScheme) -> str:
    """The layout in which keys are read: codes that share a codebook are multiplied, others are
    looked up."""
    return QUADS if scheme.has_scale else PLANES


@lru_cache(maxsize=256)
def _shape(scheme: VQScheme, dim: int, layout: str) -> tuple[int, ...]:
    """The last fields of `hf_vq_codes`."""
    learned = int(scheme.codebook == "channel_group")
    return (
        _LAYOUTS[layout], scheme.vector_size, scheme.entry_bits, learned, dim, scheme.block(dim)
    )  # fmt: skip


@lru_cache(maxsize=256)
def _objection(scheme: VQScheme, dim: int, layout: str, values: bool) -> str | None:
    """Why rows of `dim` numbers are not computed with in this scheme and layout, or None."""
    wanted = PLANES if values else key_layout(scheme)
    if scheme.residuals != 1 or scheme.lattice or scheme.codebook == "tile":
        return "KV codes have one stage, and a codebook for all rows or one per channel group"
    if reason := refusals.mode(scheme):
        return reason
    if scheme.vector_size not in VECTOR_SIZES or scheme.entry_bits not in BLOCK_BITS:
        return f"{scheme.notation()} has no kernel: x is 1, 2 or 4, codes have 4, 6 or 8 bits"
    if reason := refusals.zero(scheme):
        return reason
    if scheme.rotation not in ("none", "hadamard"):
        return f"rotation {scheme.rotation!r}"
    if dim > LARGEST_DIM or dim % (4 * scheme.vector_size):
        unit = 4 * scheme.vector_size
        return f"head_dim {dim}: it needs a multiple of {unit} up to {LARGEST_DIM}"
    if scheme.has_scale and scheme.scale_group:
        return "several scales per token"
    if layout != wanted:
        return f"codes lie in {layout!r}, not {wanted!r}"
    try:
        shape = _shape(scheme, dim, layout)
    except VQSchemeError as error:
        return str(error)
    library = native.load()
    packed = CODES.pack(*(0,) * (len(CODES.names) - len(shape)), *shape)
    if library is None or library.hf_vq_codes_supported(packed, int(values)) != native.OK:
        return f"libhf_vq_cpu does not support {scheme.spec()} at head_dim {dim}"
    return None


def _wrong_dtype(dtype: str) -> str | None:
    return None if dtype in refusals.FLOATS else f"dtype {dtype}"


def supports_append(problem: dispatch.KVAppendProblem) -> str | None:
    """None if the library encodes rows in these schemes and layouts, else the reason why not."""
    reason = _wrong_dtype(problem.dtype) or _paged(problem.memory)
    is_key = problem.memory == STATIC or problem.sides[0][2] != PLANES
    for scheme, dim, layout in problem.sides:
        reason = reason or _objection(parse(scheme), dim, layout, not is_key)
        is_key = False
    return reason


def supports_attention(problem: dispatch.KVAttentionProblem) -> str | None:
    """None if the library attends to codes in these schemes and layouts, else why not."""
    keys, values = parse(problem.key_scheme), parse(problem.value_scheme)
    key_layout, value_layout = problem.key_layout, problem.value_layout
    if not key_layout:
        key_layout, value_layout = _layouts(problem)
    return (
        _wrong_dtype(problem.dtype)
        or _paged(problem.memory)
        or _objection(keys, problem.head_dim, key_layout, False)
        or _objection(values, problem.value_dim, value_layout, True)
    )


def _paged(memory: str) -> str | None:
    return "codes lie in pages" if memory == PAGED else None


def _layouts(problem: Any) -> tuple[str, str]:
    return key_layout(parse(problem.key_scheme)), PLANES


def _codes(
    side: KVSide, view: KVCacheView, codes: Tensor, kept: _Kept, first: int, count: int
) -> tuple[int, ...]:
    """The fields of `hf_vq_codes`.

    Args:
        view: of `side`.
        codes: `side.codes`, dense.
        kept: takes what has to live until the call is over.
    """
    scheme = side.parsed
    turning = view.key_rotary_mean if side is view.key else None
    turns: tuple[int, ...] = (0, 0)
    table = start = 0
    if turning is not None:
        turning, values = _whole(turning), rotary_table.table_of(view)
        turns, table, start = turning.stride(), values.data_ptr(), view.rotary_start - side.first
        kept += turning, values
    codebook = _whole(side.codebook)
    mean, smoothing = (None if x is None else _whole(x) for x in (side.mean, side.smoothing))
    kept += codes, codebook, mean, smoothing
    data, scales = codes.stride(), side.scale.stride()
    of_heads = smoothing if mean is None else mean
    means = (0, 0) if of_heads is None else of_heads.stride()
    return (
        codes.data_ptr(), side.scale.data_ptr() if scheme.has_scale else 0, codebook.data_ptr(),
        0 if mean is None else mean.data_ptr(), 0 if smoothing is None else smoothing.data_ptr(),
        0 if turning is None else turning.data_ptr(), table,
        data[0], data[1], scales[0], scales[1], means[0], means[1], turns[0], turns[1],
        first, count, start, *_shape(scheme, side.dim, side.layout),
    )  # fmt: skip


def _floats(x: Tensor, kept: _Kept) -> tuple[int, ...]:
    """The fields of `hf_vq_floats` for `x` [B, H, n, D]."""
    x = x if x.dtype in _FLOAT_TYPES else x.float()
    x = x if x.stride(3) == 1 else x.contiguous()
    kept.append(x)
    strides = x.stride()
    return x.data_ptr(), strides[0], strides[1], strides[2], x.shape[2], native.DTYPES[x.dtype]


def _whole(x: Tensor) -> Tensor:
    """`x.contiguous()`, which takes three times as long where there is nothing to do."""
    return x if x.is_contiguous() else x.contiguous()


def _append(
    key: Tensor | None, value: Tensor | None, view: KVCacheView, slot_mapping: None = None
) -> None:
    if view.memory == STATIC:
        assert key is not None and value is not None
        return kv_static.append(key, value, view)
    library = native.load()
    assert library is not None
    for x, side in ((key, view.key), (value, view.value)):
        if x is None:
            continue
        if side.codes.stride(2) != side.codes.shape[3] or side.codes.stride(3) != 1:
            raise VQBackendError("append needs a buffer whose blocks lie one after another.")
        kept: _Kept = []
        codes = CODES.pack(*_codes(side, view, side.codes, kept, 0, 0))
        floats = FLOATS.pack(*_floats(x, kept))
        at = append_index(view, side, x.shape[2])
        native.check(library.hf_vq_append(codes, floats, x.shape[0], x.shape[1], at), "append")
    return None


def _attention(
    query: Tensor,
    view: KVCacheView,
    mask: Tensor | None,
    sink_logits: Tensor | None,
    softmax_scale: float,
    softcap: float,
) -> Tensor:
    """Attention over a coded cache; arguments as in `ops.kv_ops`."""
    if view.memory == STATIC:
        options = mask, sink_logits, softmax_scale, softcap
        return kv_static.attention(query, view, *options)
    out = query.new_empty(*query.shape[:3], view.value.dim)
    kept: _Kept = []
    step = step_of(query, out, view, mask, sink_logits, softmax_scale, softcap, kept)
    library = native.load()
    assert library is not None
    native.check(library.hf_vq_attention(step), "attention")
    return out


def step_of(
    query: Tensor,
    out: Tensor,
    view: KVCacheView,
    mask: Tensor | None,
    sink_logits: Tensor | None,
    softmax_scale: float,
    softcap: float,
    kept: _Kept,
) -> bytes:
    """The struct `hf_vq_attention_step` of api.h.

    Args:
        out: [B, Hq, Q, Dv], written to by the library.
        kept: takes what has to live until the call is over.
    """
    batch, heads, queries, _ = query.shape
    key, value, start = view.key, view.value, view.cache_leftpad
    start = None if start is None else _whole(start)
    nothing = None if sink_logits is None else sink_logits.float().contiguous()
    masks: tuple[int, ...] = (0, 0, 0)
    mask_dtype = 0
    if mask is not None:
        mask = mask if mask.dtype in native.DTYPES else mask.float()
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        mask = mask.expand(batch, heads, queries, mask.shape[-1])
        masks, mask_dtype = mask.stride()[:3], native.DTYPES[mask.dtype]
    kept += start, nothing, mask
    return STEP.pack(
        *_codes(key, view, _whole(key.codes), kept, key.first, view.num_coded),
        *_codes(value, view, _whole(value.codes), kept, value.first, view.num_coded),
        *_floats(key.sinks, kept), *_floats(value.sinks, kept), *_floats(key.recent, kept),
        *_floats(value.recent, kept), *_floats(query, kept),
        out.data_ptr(), *out.stride()[:3],
        0 if start is None else start.data_ptr(), 0 if mask is None else mask.data_ptr(), *masks,
        0 if nothing is None else nothing.data_ptr(),
        batch, key.heads, heads // key.heads, queries, view.recent_start, view.window,
        view.num_new, mask_dtype, softmax_scale, softcap,
    )  # fmt: skip


def bind_append(problem: dispatch.KVAppendProblem) -> dispatch.Bound | None:
    """`hf_vq::cpu_append`, if torch lets us register it, for one side of a growing cache."""
    op = boxed_ops.cpu_append() if problem.memory != STATIC else None
    if op is None:
        return None
    ((scheme, dim, layout),) = problem.sides
    shape = _shape_tensor(scheme, dim, layout)
    none = torch.empty(0, device="cpu")
    table = rotary_table.OfLayer()

    def run(x: Tensor, side: KVSide, at: int, view: KVCacheView) -> Tensor | None:
        mean, smoothing = side.mean, side.smoothing
        done: Tensor | None = op(
            x, none if mean is None else mean, none if smoothing is None else smoothing,
            side.codebook, side.codes, side.scale, shape,
            none, none, at, 0,
        )  # fmt: skip
        return done

    def run_rotary(x: Tensor, side: KVSide, at: int, view: KVCacheView) -> Tensor | None:
        mean, smoothing = side.mean, side.smoothing
        done: Tensor | None = op(
            x, none if mean is None else mean, none if smoothing is None else smoothing,
            side.codebook, side.codes, side.scale, shape,
            view.key_rotary_mean, table.of(view), at, view.rotary_start - side.first,
        )  # fmt: skip
        return done

    return run_rotary if problem.rotary else run


def bind_attention(problem: dispatch.KVAttentionProblem) -> dispatch.Bound | None:
    """`hf_vq::cpu_attention`, if torch lets us register it, for a growing cache."""
    op = boxed_ops.cpu_attention() if problem.memory != STATIC else None
    if op is None:
        return None
    k_shape = _shape_tensor(problem.key_scheme, problem.head_dim, problem.key_layout)
    v_shape = _shape_tensor(problem.value_scheme, problem.value_dim, problem.value_layout)
    none = torch.empty(0, device="cpu")
    table = rotary_table.OfLayer()

    def run(
        query: Tensor, view: KVCacheView, softmax_scale: float, softcap: float
    ) -> Tensor | None:
        key, value = view.key, view.value
        out: Tensor | None = op(
            query, key.sinks, value.sinks, key.codes, key.scale,
            none if key.mean is None else key.mean,
            none if key.smoothing is None else key.smoothing, value.codes, value.scale, key.recent,
            value.recent, key.codebook, value.codebook, k_shape, v_shape, none, none,
            view.max_seqlen - key.recent.shape[2], view.window, view.num_new, view.num_coded,
            key.first, value.first, 0, softmax_scale, softcap,
        )  # fmt: skip
        return out

    def run_rotary(
        query: Tensor, view: KVCacheView, softmax_scale: float, softcap: float
    ) -> Tensor | None:
        key, value = view.key, view.value
        out: Tensor | None = op(
            query, key.sinks, value.sinks, key.codes, key.scale,
            none if key.mean is None else key.mean,
            none if key.smoothing is None else key.smoothing, value.codes, value.scale, key.recent,
            value.recent, key.codebook, value.codebook, k_shape, v_shape, view.key_rotary_mean,
            table.of(view),
            view.max_seqlen - key.recent.shape[2], view.window, view.num_new, view.num_coded,
            key.first, value.first, view.rotary_start - key.first, softmax_scale, softcap,
        )  # fmt: skip
        return out

    return run_rotary if problem.rotary else run


def _shape_tensor(scheme: str, dim: int, layout: str) -> Tensor:
    return torch.tensor(_shape(parse(scheme), dim, layout), dtype=torch.int32, device="cpu")


def scores(
    query: Tensor, view: KVCacheView, softmax_scale: float = 1.0, score: Tensor | None = None
) -> Tensor:
    """The logits of coded keys as `cpu.vq_attention` computes them, for benchmarks and tests.

    Args:
        query: [B, Hq, Q, D].
        view: the layer; its codes lie in the layouts of `cpu.vq_attention`.
        score: written to, if not None.

    Returns:
        float32 [B, Hq, Q, num_coded] softmax_scale <q, k>.
    """
    if score is None:
        score = torch.empty(*query.shape[:3], view.num_coded)
    kept: _Kept = []
    out = query.new_empty(*query.shape[:3], view.value.dim)
    step = step_of(query, out, view, None, None, softmax_scale, 0.0, kept)
    library = native.load()
    assert library is not None
    native.check(library.hf_vq_coded_scores(step, score.data_ptr()), "attention")
    return score


APPEND = Implementation(_append, supports_append, bind_append)
ATTENTION = Implementation(_attention, supports_attention, bind_attention, _layouts)
