"""`append` and `attention` on the CPU: a KV cache by libhf_vq_cpu (`kernels/cpu/api.h`)."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ... import dispatch
from ...dispatch import Implementation
from ...errors import VQBackendError, VQSchemeError
from ...formats.scheme import VQScheme
from ...ops.attention import CachedKV
from ...ops.layout import BLOCK_BITS, PLANES, QUADS
from ...ops.library import parse
from .. import refusals
from . import boxed_ops
from . import library as native

LARGEST_DIM = 256
VECTOR_SIZES = (1, 2, 4)
_FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16)

# Structs of api.h, field by field.
_CODES = "4P8q6i"
_FLOATS = "P4qi0q"
_append_codes = struct.Struct(f"@{_CODES}")
_append_floats = struct.Struct(f"@{_FLOATS}")
_step = struct.Struct(f"@{2 * _CODES}{5 * _FLOATS}P3q2P3qP7qi2f0q")
_LAYOUTS = {QUADS: 1, PLANES: 2}


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
    packed = _append_codes.pack(*(0,) * 12, *shape)
    if library is None or library.hf_vq_codes_supported(packed, int(values)) != native.OK:
        return f"libhf_vq_cpu does not support {scheme.spec()} at head_dim {dim}"
    return None


def _wrong_dtype(dtype: str) -> str | None:
    return None if dtype in refusals.FLOATS else f"dtype {dtype}"


def supports_append(problem: dispatch.AppendProblem) -> str | None:
    """None if the library encodes rows in this scheme and layout, else the reason why not."""
    scheme, values = parse(problem.scheme), problem.layout == PLANES
    return _wrong_dtype(problem.dtype) or _objection(
        scheme, problem.head_dim, problem.layout, values
    )


def supports_attention(
    problem: dispatch.AttentionProblem | dispatch.StaticAttentionProblem | dispatch.StoreProblem,
) -> str | None:
    """None if the library attends to codes in these schemes and layouts, else why not."""
    keys, values = parse(problem.key_scheme), parse(problem.value_scheme)
    key_layout, value_layout = problem.key_layout, problem.value_layout
    if not key_layout:
        key_layout, value_layout = _layouts(problem)
    return (
        _wrong_dtype(problem.dtype)
        or _objection(keys, problem.head_dim, key_layout, False)
        or _objection(values, problem.value_dim, value_layout, True)
    )


def _layouts(problem: Any) -> tuple[str, str]:
    return key_layout(parse(problem.key_scheme)), PLANES


def _codes(
    codes: Tensor,
    scale: Tensor,
    mean: Tensor | None,
    codebook: Tensor,
    first: int,
    count: int,
    scheme: VQScheme,
    dim: int,
    layout: str,
) -> tuple[int, ...]:
    """The fields of `hf_vq_codes`."""
    data, scales = codes.stride(), scale.stride()
    means = (0, 0) if mean is None else mean.stride()
    return (
        codes.data_ptr(), scale.data_ptr() if scheme.has_scale else 0, codebook.data_ptr(),
        0 if mean is None else mean.data_ptr(),
        data[0], data[1], scales[0], scales[1], means[0], means[1], first, count,
        *_shape(scheme, dim, layout),
    )  # fmt: skip


def _floats(x: Tensor) -> tuple[int, ...]:
    """The fields of `hf_vq_floats`."""
    strides = x.stride()
    return x.data_ptr(), strides[0], strides[1], strides[2], x.shape[2], native.DTYPES[x.dtype]


def _whole(x: Tensor) -> Tensor:
    """`x.contiguous()`, which takes three times as long where there is nothing to do."""
    return x if x.is_contiguous() else x.contiguous()


def _dense(x: Tensor) -> Tensor:
    """`x` [B, H, n, D] as the library reads it: the last dimension dense."""
    x = x if x.dtype in _FLOAT_TYPES else x.float()
    return x if x.stride(3) == 1 else x.contiguous()


def _append(
    x: Tensor,
    mean: Tensor | None,
    codebook: Tensor,
    codes: Tensor,
    scale: Tensor,
    at: int,
    scheme: VQScheme,
    layout: str,
) -> None:
    if codes.stride(2) != codes.shape[3] or codes.stride(3) != 1:
        raise VQBackendError("append needs a tape whose blocks lie one after another.")
    x, codebook = _dense(x), _whole(codebook)
    mean = None if mean is None else _whole(mean)
    fields = _codes(codes, scale, mean, codebook, 0, 0, scheme, x.shape[3], layout)
    library = native.load()
    assert library is not None
    status = library.hf_vq_append(
        _append_codes.pack(*fields), _append_floats.pack(*_floats(x)), x.shape[0], x.shape[1], at
    )
    native.check(status, "append")


def _attention(
    query: Tensor,
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
    mask: Tensor | None,
    s_aux: Tensor | None,
    tail_start: int,
    window: int,
    fresh: int,
    coded: int,
    k_first: int,
    v_first: int,
    scaling: float,
    softcap: float,
    key_scheme: VQScheme,
    value_scheme: VQScheme,
    key_layout: str,
    value_layout: str,
    score: Tensor | None = None,
) -> Tensor:
    """Attention over a coded cache; shapes and meaning in `ops.attention.CachedKV`.

    Args:
        score: float32 [B, Hq, Q, coded], if not None: write only the logits of coded keys there.
    """
    batch, heads, queries, dim = query.shape
    value_dim, kv_heads = tail_v.shape[3], tail_k.shape[1]
    out = query.new_empty(batch, heads, queries, value_dim)
    # Names keep what had to be copied alive until the call is over.
    query, sink_k, sink_v = _dense(query), _dense(sink_k), _dense(sink_v)
    tail_k, tail_v = _dense(tail_k), _dense(tail_v)
    k_codes, v_codes = _whole(k_codes), _whole(v_codes)
    codebook_k, codebook_v = _whole(codebook_k), _whole(codebook_v)
    mean = None if k_mean is None else _whole(k_mean)
    start = None if start is None else _whole(start)
    s_aux = None if s_aux is None else s_aux.float().contiguous()
    masks: tuple[int, ...] = (0, 0, 0)
    mask_dtype = 0
    if mask is not None:
        mask = mask if mask.dtype in native.DTYPES else mask.float()
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        mask = mask.expand(batch, heads, queries, mask.shape[-1])
        masks, mask_dtype = mask.stride()[:3], native.DTYPES[mask.dtype]
    step = _step.pack(
        *_codes(k_codes, k_scale, mean, codebook_k, k_first, coded, key_scheme, dim, key_layout),
        *_codes(
            v_codes, v_scale, None, codebook_v, v_first, coded, value_scheme, value_dim,
            value_layout,
        ),
        *_floats(sink_k), *_floats(sink_v), *_floats(tail_k), *_floats(tail_v), *_floats(query),
        out.data_ptr(), *out.stride()[:3],
        0 if start is None else start.data_ptr(), 0 if mask is None else mask.data_ptr(), *masks,
        0 if s_aux is None else s_aux.data_ptr(),
        batch, kv_heads, heads // kv_heads, queries, tail_start, window, fresh,
        mask_dtype, scaling, softcap,
    )  # fmt: skip
    library = native.load()
    assert library is not None
    if score is None:
        native.check(library.hf_vq_attention(step), "attention")
    else:
        native.check(library.hf_vq_coded_scores(step, score.data_ptr()), "attention")
    return out


def bind_append(problem: dispatch.AppendProblem) -> dispatch.Bound | None:
    """`hf_vq::cpu_append`, if torch lets us register it."""
    op = boxed_ops.cpu_append()
    if op is None:
        return None
    shape = _shape_tensor(problem.scheme, problem.head_dim, problem.layout)
    none = torch.empty(0, device="cpu")

    def run(
        x: Tensor, mean: Tensor | None, codebook: Tensor, codes: Tensor, scale: Tensor, at: int
    ) -> Tensor | None:
        done: Tensor | None = op(
            x, none if mean is None else mean, codebook, codes, scale, shape, at
        )
        return done

    return run


def bind_attention(problem: dispatch.AttentionProblem) -> dispatch.Bound | None:
    """`hf_vq::cpu_attention`, if torch lets us register it."""
    op = boxed_ops.cpu_attention()
    if op is None:
        return None
    shapes = (
        _shape_tensor(problem.key_scheme, problem.head_dim, problem.key_layout),
        _shape_tensor(problem.value_scheme, problem.value_dim, problem.value_layout),
    )
    none = torch.empty(0, device="cpu")

    def run(query: Tensor, cached: CachedKV, scaling: float, softcap: float) -> Tensor | None:
        mean = none if cached.k_mean is None else cached.k_mean
        out: Tensor | None = op(
            query, *cached[:4], mean, *cached[5:11], *shapes, *cached[12:18], scaling, softcap
        )
        return out

    return run


def _shape_tensor(scheme: str, dim: int, layout: str) -> Tensor:
    return torch.tensor(_shape(parse(scheme), dim, layout), dtype=torch.int32, device="cpu")


def scores(
    query: Tensor, cached: CachedKV, scaling: float = 1.0, score: Tensor | None = None
) -> Tensor:
    """The logits of coded keys as `cpu.vq_attention` computes them, for benchmarks and tests.

    Args:
        query: [B, Hq, Q, D].
        cached: the layer; its codes lie in the layouts of `cpu.vq_attention`.
        score: written to, if not None.

    Returns:
        float32 [B, Hq, Q, coded] scaling <q, k>.
    """
    if score is None:
        score = torch.empty(*query.shape[:3], cached.coded)
    c = cached
    _attention(
        query, c.sink_k, c.sink_v, c.k_codes, c.k_scale, c.k_mean, c.v_codes, c.v_scale,
        c.tail_k, c.tail_v, c.codebook_k, c.codebook_v, c.start, None, None, c.tail_start,
        c.window, c.fresh, c.coded, c.k_first, c.v_first, scaling, 0.0,
        parse(c.key_scheme), parse(c.value_scheme), c.key_layout, c.value_layout, score,
    )  # fmt: skip
    return score


APPEND = Implementation(_append, supports_append, bind_append)
ATTENTION = Implementation(_attention, supports_attention, bind_attention, _layouts)
