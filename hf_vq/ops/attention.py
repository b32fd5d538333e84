"""`hf_vq::attention`: softmax(q K^T) V read from codes, for one layer of a KV cache."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import dispatch
from ..errors import VQCacheError
from .codes import decode_kv
from .layout import to_rows
from .library import attention_problem, define, only_result, parse
from .reference.codes import in_dtype

_can_autocast = lru_cache(torch.amp.is_autocast_available)
_AS_IT_IS = nullcontext()


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on for a device."""
    kind = device.type
    return _can_autocast(kind) and torch.is_autocast_enabled(kind)


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Codes and scales are computed in float32, which autocast would quietly lower."""
    return torch.autocast(device.type, enabled=False) if autocasts(device) else _AS_IT_IS


class CachedKV(NamedTuple):
    """One layer's keys and values, as attention reads them. Position 0 is the first visible token.

    Keys and values may differ in dtype, as they do under autocast. A tuple, because every layer
    makes one at every step.

    B rows, H key/value heads, S sinks, C coded tokens, L tokens in the tail; the layer holds
    `tail_start + L` tokens and `tail_start <= C`. Tensors may be views: only the last dimension
    must be dense. Codes and scales are those of a tape, longer than its tokens: what lies in front
    of `k_first` and behind C tokens is not read.

    Args:
        sink_k: [B, H, S, D] the first S tokens of each row in the model's dtype.
        sink_v: [B, H, S, Dv].
        k_codes: uint8 codes of a tape in `key_layout` (`ops.layout`), sinks included, unread.
        k_scale: fp16 [B, H, tape, 1], or [B, H, tape, 0] for a scheme without scales; 2 of mode
            `product`.
        k_mean: float32 [B, H, 1, D], added to every decoded key; None = 0.
        v_codes: uint8 codes of a tape in `value_layout`.
        v_scale: like `k_scale`.
        tail_k: [B, H, L, D] the newest tokens in the model's dtype, at positions tail_start...
        tail_v: [B, H, L, Dv].
        codebook_k: fp16 [1, entries, x], or learned [H, D / x, entries, x].
        codebook_v: fp16 [1, entries, x], or learned [H, Dv / x, entries, x].
        start: int64 [B], the position of each row's first token (left padding); None = all 0.
        tail_start: position of the first token of the tail.
        window: a query at position i reads j > i - window from the tail.
        fresh: tokens of the newest update, which all queries read from the tail.
        coded: C, tokens that have codes: positions 0..C-1.
        k_first: index on the tape of the keys of the token at position 0.
        v_first: index on the tape of the values of the token at position 0.
        key_scheme: spec string, how keys were encoded.
        value_scheme: spec string, how values were encoded.
        key_layout: order of the codes on the tape of the keys.
        value_layout: order of the codes on the tape of the values.
    """

    sink_k: Tensor
    sink_v: Tensor
    k_codes: Tensor
    k_scale: Tensor
    k_mean: Tensor | None
    v_codes: Tensor
    v_scale: Tensor
    tail_k: Tensor
    tail_v: Tensor
    codebook_k: Tensor
    codebook_v: Tensor
    start: Tensor | None
    tail_start: int
    window: int
    fresh: int
    coded: int
    k_first: int
    v_first: int
    key_scheme: str
    value_scheme: str
    key_layout: str
    value_layout: str

    @property
    def length(self) -> int:
        """Tokens that attention sees."""
        return self.tail_start + self.tail_k.shape[2]

    def dense(self, side: str, window_of: int) -> Tensor:
        """Keys (`side` "k") or values ("v") decoded: [B, H, length, D] in the model's dtype.

        Args:
            window_of: the position whose window is exact; later queries share it.
        """
        if side == "k":
            codes, scale, first, mean = self.k_codes, self.k_scale, self.k_first, self.k_mean
            book, scheme, layout = self.codebook_k, parse(self.key_scheme), self.key_layout
            tail, sinks = self.tail_k, self.sink_k
        else:
            codes, scale, first, mean = self.v_codes, self.v_scale, self.v_first, None
            book, scheme, layout = self.codebook_v, parse(self.value_scheme), self.value_layout
            tail, sinks = self.tail_v, self.sink_v
        near = max(min(window_of - self.window + 1, self.length - self.fresh), self.tail_start, 0)
        near = min(near, self.coded)
        codes = to_rows(codes, first, near, scheme.entry_bits, layout)
        with without_autocast(tail.device):
            scale = scale[:, :, first : first + near]
            rows = decode_kv(codes, scale, book, scheme, tail.shape[-1])
        rows = rows if mean is None else rows + mean
        rows = torch.cat([in_dtype(rows, tail.dtype), tail[:, :, near - self.tail_start :]], 2)
        if not sinks.shape[2]:
            return rows
        start = self.start
        if start is None:
            start = torch.zeros(rows.shape[0], dtype=torch.int64, device=rows.device)
        slot = torch.arange(rows.shape[2], device=rows.device) - start[:, None]
        index = slot.clamp(0, sinks.shape[2] - 1)[:, None, :, None].expand_as(rows)
        is_sink = ((slot >= 0) & (slot < sinks.shape[2]))[:, None, :, None]
        return torch.where(is_sink, sinks.gather(2, index), rows)


def attention(
    query: Tensor,
    cached: CachedKV,
    *,
    scaling: float,
    mask: Tensor | None = None,
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Attention of the newest tokens over a coded cache.

    Args:
        query: [B, Hq, Q, D], Hq a multiple of the key/value heads; the last query is the last
            cached token.
        cached: the layer.
        scaling: factor of the logits, usually D^-1/2.
        mask: bool (True = may attend) or additive [B or 1, Hq or 1, Q or 1, >= length]; None is
            causal.
        softcap: c of c tanh(s / c); 0 = off.
        s_aux: [Hq] logits that attend to nothing.

    Returns:
        [B, Hq, Q, Dv] of the dtype of `query`.

    Raises:
        VQCacheError: the shapes do not belong together.
    """
    kv_heads, dim = cached.tail_k.shape[1], cached.tail_k.shape[-1]
    if query.shape[1] % kv_heads or query.shape[-1] != dim:
        raise VQCacheError(
            f"attention got queries {list(query.shape)} for a cache with {kv_heads} key/value "
            f"heads of {dim}; the heads must be a multiple and head_dim equal."
        )
    if mask is not None and mask.shape[-1] < cached.length:
        raise VQCacheError(
            f"the attention mask covers {mask.shape[-1]} tokens but the cache holds "
            f"{cached.length}; pass a mask over past and new tokens."
        )
    alone = only_result(query, cached.tail_k, cached.tail_v, mask, s_aux)
    if alone and mask is None and s_aux is None and cached.start is None:
        problem = attention_problem(
            query.device, query.dtype, cached.key_scheme, cached.value_scheme, dim,
            cached.tail_v.shape[3], query.shape[2], cached.length, cached.key_layout,
            cached.value_layout,
        )  # fmt: skip
        bound = dispatch.bind(problem)
        found = None if bound is None else bound(query, cached, scaling, softcap)
        if found is not None:
            return found
    run = _attention if alone else torch.ops.hf_vq.attention.default
    with without_autocast(query.device):  # the schema's order is that of CachedKV
        out: Tensor = run(
            query, *cached[:12], mask, s_aux, *cached[12:18], scaling, softcap, *cached[18:]
        )
    return out


def _attention(query: Tensor, *arguments: Any) -> Tensor:
    *tensors, key_scheme, value_scheme, key_layout, value_layout = arguments
    tail_k, tail_v, tail_start = tensors[7], tensors[8], tensors[14]
    queries, dim = query.shape[2:]
    problem = attention_problem(
        query.device, query.dtype, key_scheme, value_scheme, dim, tail_v.shape[3], queries,
        tail_start + tail_k.shape[2], key_layout, value_layout,
    )  # fmt: skip
    out: Tensor = dispatch.select(problem).run(
        query, *tensors, parse(key_scheme), parse(value_scheme), key_layout, value_layout
    )
    return out


def _fake_attention(query: Tensor, *arguments: Any) -> Tensor:
    tail_v: Tensor = arguments[8]
    return query.new_empty(*query.shape[:-1], tail_v.shape[-1])


define(
    "attention",
    "(Tensor query, Tensor sink_k, Tensor sink_v, Tensor k_codes, Tensor k_scale, Tensor? k_mean, "
    "Tensor v_codes, Tensor v_scale, Tensor tail_k, Tensor tail_v, Tensor codebook_k, "
    "Tensor codebook_v, Tensor? start, Tensor? mask, Tensor? s_aux, int tail_start, int window, "
    "int fresh, int coded, int k_first, int v_first, float scaling, float softcap, "
    "str key_scheme, str value_scheme, str key_layout, str value_layout) -> Tensor",
    _attention,
    _fake_attention,
)
