"""The specification of `hf_vq::kv_attention`, in float32, as it is written on paper.

s_ij = softmax_scale <q_i, k_j>                softcap: c tanh(s / c)
k_j, v_j  the stored floats    if j is a sink, j > i - window, or j came with this update
          m_j + R^-1(scale codebook[code])     otherwise (0 for values; of keys the mean, and the
                                               rotary mean at position j: `ops.rotary_mean`)
o_i = sum_j softmax_j(s_i, sink_logits) v_j

Of a static cache: `kv_static`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kv import KVCacheView, KVSide
from ..layout import ROWS, to_rows
from ..rotary_mean import rotated_key_mean
from . import codes as reference


def attention(
    query: Tensor,
    view: KVCacheView,
    mask: Tensor | None,
    sink_logits: Tensor | None,
    softmax_scale: float,
    softcap: float,
) -> Tensor:
    """Attention over a growing cache; arguments as in `ops.kv_ops`."""
    key, value = view.key, view.value
    kv_heads, queries = key.heads, query.shape[2]
    total, start = view.max_seqlen, view.recent_start
    k, v = outside_window(key, view), outside_window(value, view)

    i = torch.arange(total - queries, total, device=query.device)[:, None]
    j = torch.arange(start, total, device=query.device)
    exact = (j > i - view.window) | (j >= total - view.num_new)  # [Q, recent]

    grouped = query.float().reshape(query.shape[0], kv_heads, -1, query.shape[-1])  # [B, H, nQ, D]
    exact = exact.repeat(grouped.shape[2] // queries, 1)
    scores = grouped @ k.mT
    near = grouped @ key.recent.float().mT
    scores[..., start:] = torch.where(exact, near, scores[..., start:])
    scores = scores.reshape(*query.shape[:3], total) * softmax_scale
    weights = softmax(scores, mask, softcap, sink_logits).reshape(*grouped.shape[:3], total)
    near = weights[..., start:] * exact
    weights = torch.cat([weights[..., :start], weights[..., start:] * ~exact], -1)
    out = weights @ v + near @ value.recent.float()
    return reference.in_dtype(out.reshape(*query.shape[:3], -1), query.dtype)


def attention_paged(
    query: Tensor,
    view: KVCacheView,
    mask: Tensor | None,
    sink_logits: Tensor | None,
    softmax_scale: float,
    softcap: float,
) -> Tensor:
    """Attention over codes in pages: copied side by side. Arguments as in `ops.kv_ops`."""
    table, length, page_size = view.page_table, view.cache_seqlens, view.page_size
    assert table is not None and length is not None and mask is None
    pages = table[:, : -(-view.max_seqlen // page_size)].clamp_min(0)  # those that a row lacks: any
    total = pages.shape[1] * page_size
    position = torch.arange(total, device=query.device)
    there = (position < length[:, None])[:, None, :, None]

    def copied(side: KVSide) -> KVSide:
        codes, scale = (
            part[pages].transpose(1, 2).flatten(2, 3) for part in (side.codes, side.scale)
        )
        # Zeros, where nobody has written: what was there before may be no number.
        none = query.new_empty(query.shape[0], side.codes.shape[1], 0, side.dim)
        scale = scale.masked_fill(~there, 0)
        return side._replace(
            codes=codes, scale=scale, sinks=none, recent=none, first=0, layout=ROWS
        )

    first = length[:, None] - query.shape[2]
    last = first + torch.arange(query.shape[2], device=query.device)
    whole = view._replace(
        key=copied(view.key), value=copied(view.value), cache_seqlens=None, page_table=None,
        max_seqlen=total, window=0, num_new=0, num_coded=total,
    )  # fmt: skip
    causal = (position <= last[..., None])[:, None]
    return attention(query, whole, causal, sink_logits, softmax_scale, softcap)


def outside_window(side: KVSide, view: KVCacheView) -> Tensor:
    """Every key (or value) as a query sees it that has it outside its window: [B, H, total, D].

    Sinks are floats, and so are the tokens at the end that have no code yet.
    """
    scheme, dim, coded, slots = side.parsed, side.dim, view.num_coded, side.sinks.shape[2]
    codes = to_rows(side.codes, side.first, coded, scheme.entry_bits, side.layout)
    scale = side.scale[:, :, side.first : side.first + coded]
    rows = reference.decode_rows(codes, side.codebook, scale, scheme, dim)
    rows = rows if side.smoothing is None else rows / side.smoothing
    rows = rows if side.mean is None else rows + side.mean.float()
    if side is view.key and view.key_rotary_mean is not None:
        rows = rows + rotated_key_mean(view, torch.arange(coded, device=rows.device))
    rows = torch.cat([rows, side.recent[:, :, coded - view.recent_start :].float()], 2)
    if slots == 0:
        return rows
    if view.cache_leftpad is None:
        slots = min(slots, rows.shape[2])
        rows[:, :, :slots] = side.sinks[:, :, :slots].float()
        return rows
    slot = torch.arange(rows.shape[2], device=rows.device) - view.cache_leftpad[:, None]
    index = slot.clamp(0, slots - 1)[:, None, :, None].expand(-1, rows.shape[1], -1, dim)
    is_sink = ((slot >= 0) & (slot < slots))[:, None, :, None]  # [B, 1, total, 1]
    return torch.where(is_sink, side.sinks.float().gather(2, index), rows)


def softmax(
    scores: Tensor, mask: Tensor | None, softcap: float = 0.0, sink_logits: Tensor | None = None
) -> Tensor:
    """Attention weights of float32 scores [B, Hq, Q, total]; a query that sees nothing gets zeros.

    Args:
        mask: bool (True = may attend) or additive, broadcastable, at least `total` long; None is
            causal with the last query at the last key.
        softcap: c of c tanh(s / c), Gemma 2; 0 = off.
        sink_logits: one more logit per query head [Hq] that attends to nothing, GPT-OSS.
    """
    queries, total = scores.shape[-2:]
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None and queries > 1:
        mask = torch.ones(queries, total, dtype=torch.bool, device=scores.device)
        mask = mask.tril(total - queries)
    if mask is not None:
        mask = mask[..., :total]
        blocked = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if blocked else scores + mask.float()
    if sink_logits is not None:
        sink = sink_logits.float().reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], -1)
    return scores.softmax(-1)[..., :total].nan_to_num(0.0)
