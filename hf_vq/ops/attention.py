"""`hf_vq::attention`: softmax(q K^T) V read from codes, for one layer of a KV cache."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import VQCacheError
from ..formats.scheme import VQScheme
from . import dispatch
from .codes import decode_kv
from .library import define, parse


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Codes and scales are computed in float32, which autocast would quietly lower."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


@dataclass(frozen=True)
class CachedKV:
    """One layer's keys and values, as attention reads them. Position 0 is the first visible token.

    Keys and values may differ in dtype, as they do under autocast.

    B rows, H key/value heads, S sinks, C coded tokens, L tokens in the tail; the layer holds
    `tail_start + L` tokens and `tail_start <= C`. Tensors may be views: only the last dimension
    must be dense.

    Args:
        sink_k: [B, H, S, D] the first S tokens of each row in the model's dtype.
        sink_v: [B, H, S, Dv].
        k_codes: uint8 [B, H, C, bytes] codes of positions 0..C-1 (sinks included, unread).
        k_scale: fp16 [B, H, C, 1].
        k_mean: float32 [B, H, 1, D], added to every decoded key.
        v_codes: uint8 [B, H, C, bytes].
        v_scale: fp16 [B, H, C, 1].
        tail_k: [B, H, L, D] the newest tokens in the model's dtype, at positions tail_start...
        tail_v: [B, H, L, Dv].
        codebook_k: fp16 [1, entries, x].
        codebook_v: fp16 [1, entries, x].
        start: int64 [B], the position of each row's first token (left padding); None = all 0.
        tail_start: position of the first token of the tail.
        window: a query at position i reads j > i - window from the tail.
        fresh: tokens of the newest update, which all queries read from the tail.
        key_scheme: how keys were encoded.
        value_scheme: how values were encoded.
    """

    sink_k: Tensor
    sink_v: Tensor
    k_codes: Tensor
    k_scale: Tensor
    k_mean: Tensor
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
    key_scheme: VQScheme
    value_scheme: VQScheme

    @property
    def length(self) -> int:
        """Tokens that attention sees."""
        return self.tail_start + self.tail_k.shape[2]

    def dense(self, side: str, window_of: int) -> Tensor:
        """Keys (`side` "k") or values ("v") decoded: [B, H, length, D] in the model's dtype.

        Args:
            window_of: the position whose window is exact; later queries share it.
        """
        key = side == "k"
        codes, scale = (self.k_codes, self.k_scale) if key else (self.v_codes, self.v_scale)
        book, scheme = (
            (self.codebook_k, self.key_scheme) if key else (self.codebook_v, self.value_scheme)
        )
        tail, sinks = (self.tail_k, self.sink_k) if key else (self.tail_v, self.sink_v)
        near = max(min(window_of - self.window + 1, self.length - self.fresh), self.tail_start, 0)
        near = min(near, codes.shape[2])
        with without_autocast(tail.device):
            rows = decode_kv(codes[:, :, :near], scale[:, :, :near], book, scheme, tail.shape[-1])
        rows = rows + self.k_mean if key else rows
        rows = torch.cat([rows.to(tail.dtype), tail[:, :, near - self.tail_start :]], 2)
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
    with without_autocast(query.device):
        out: Tensor = torch.ops.hf_vq.attention(
            query, cached.sink_k, cached.sink_v,
            cached.k_codes, cached.k_scale, cached.k_mean, cached.v_codes, cached.v_scale,
            cached.tail_k, cached.tail_v, cached.codebook_k, cached.codebook_v,
            cached.start, mask, s_aux, cached.tail_start, cached.window, cached.fresh,
            scaling, softcap, cached.key_scheme.spec(), cached.value_scheme.spec(),
        )  # fmt: skip
    return out


def _attention(query: Tensor, *arguments: Any) -> Tensor:
    *tensors, key_scheme, value_scheme = arguments
    tail_k, tail_start = tensors[7], tensors[14]
    problem = dispatch.Problem(
        "attention", query.device.type, str(query.dtype)[6:], f"{key_scheme} {value_scheme}",
        tokens=dispatch.bucket(query.shape[0] * query.shape[2]),
        n=dispatch.bucket(tail_start + tail_k.shape[2]), k=query.shape[-1],
    )  # fmt: skip
    kernel = dispatch.select(problem)
    out: Tensor = kernel.run(query, *tensors, parse(key_scheme), parse(value_scheme))
    return out


def _fake_attention(query: Tensor, *arguments: Any) -> Tensor:
    tail_v: Tensor = arguments[8]
    return query.new_empty(*query.shape[:-1], tail_v.shape[-1])


define(
    "attention",
    "(Tensor query, Tensor sink_k, Tensor sink_v, Tensor k_codes, Tensor k_scale, Tensor k_mean, "
    "Tensor v_codes, Tensor v_scale, Tensor tail_k, Tensor tail_v, Tensor codebook_k, "
    "Tensor codebook_v, Tensor? start, Tensor? mask, Tensor? s_aux, int tail_start, int window, "
    "int fresh, float scaling, float softcap, str key_scheme, str value_scheme) -> Tensor",
    _attention,
    _fake_attention,
)
