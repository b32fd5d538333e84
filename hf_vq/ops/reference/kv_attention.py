"""The specification of `hf_vq::attention`, in float32, as it is written on paper.

s_ij = scaling <q_i, k_j>                      softcap: c tanh(s / c)
k_j, v_j  the stored floats    if j is a sink, j > i - window, or j came with this update
          m + R^-1(scale codebook[code])       otherwise (m = 0 for values and without k_mean)
o_i = sum_j softmax_j(s_i, s_aux) v_j
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats.scheme import VQScheme
from ..layout import ROWS, to_rows
from . import codes as reference


def attention(
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
) -> Tensor:
    """Attention over a coded cache; shapes and meaning in `ops.attention.CachedKV`."""
    kv_heads, queries = tail_k.shape[1], query.shape[2]
    total = tail_start + tail_k.shape[2]
    k_codes = to_rows(k_codes, k_first, coded, key_scheme.entry_bits, key_layout)
    v_codes = to_rows(v_codes, v_first, coded, value_scheme.entry_bits, value_layout)
    k_scale = k_scale[:, :, k_first : k_first + coded]
    v_scale = v_scale[:, :, v_first : v_first + coded]
    k = outside_window(
        k_codes, k_scale, codebook_k, key_scheme, k_mean, tail_k, sink_k, start, tail_start
    )
    v = outside_window(
        v_codes, v_scale, codebook_v, value_scheme, None, tail_v, sink_v, start, tail_start
    )

    i = torch.arange(total - queries, total, device=query.device)[:, None]
    j = torch.arange(tail_start, total, device=query.device)
    exact = (j > i - window) | (j >= total - fresh)  # [Q, tail]

    grouped = query.float().reshape(query.shape[0], kv_heads, -1, query.shape[-1])  # [B, H, nQ, D]
    exact = exact.repeat(grouped.shape[2] // queries, 1)
    scores = grouped @ k.mT
    near = grouped @ tail_k.float().mT
    scores[..., tail_start:] = torch.where(exact, near, scores[..., tail_start:])
    scores = scores.reshape(*query.shape[:3], total) * scaling
    weights = softmax(scores, mask, softcap, s_aux).reshape(*grouped.shape[:3], total)
    near = weights[..., tail_start:] * exact
    weights = torch.cat([weights[..., :tail_start], weights[..., tail_start:] * ~exact], -1)
    out = weights @ v + near @ tail_v.float()
    return reference.in_dtype(out.reshape(*query.shape[:3], -1), query.dtype)


def attention_paged(
    query: Tensor,
    k_codes: Tensor,
    k_scale: Tensor,
    k_mean: Tensor | None,
    v_codes: Tensor,
    v_scale: Tensor,
    codebook_k: Tensor,
    codebook_v: Tensor,
    table: Tensor,
    length: Tensor,
    s_aux: Tensor | None,
    longest: int,
    scaling: float,
    softcap: float,
    key_scheme: VQScheme,
    value_scheme: VQScheme,
) -> Tensor:
    """Attention over codes in pages: copied side by side. Shapes and meaning in
    `ops.paged.PagedKV`."""
    heads, tokens = k_codes.shape[1:3]
    pages = table[:, : -(-longest // tokens)].clamp_min(0)  # those that a row lacks: any
    total = pages.shape[1] * tokens
    position = torch.arange(total, device=query.device)
    there = (position < length[:, None])[:, None, :, None]

    def tape(part: Tensor) -> Tensor:
        return part[pages].transpose(1, 2).flatten(2, 3)

    # Zeros, where nobody has written: what was there before may be no number.
    scales = (tape(part).masked_fill(~there, 0) for part in (k_scale, v_scale))
    first = length[:, None] - query.shape[2]
    last = first + torch.arange(query.shape[2], device=query.device)
    none = query.new_empty(query.shape[0], heads, 0, query.shape[3])
    return attention(
        query, none, none, tape(k_codes), next(scales), k_mean, tape(v_codes), next(scales), none,
        none, codebook_k, codebook_v, None, (position <= last[..., None])[:, None], s_aux, total, 0,
        0, total, 0, 0, scaling, softcap, key_scheme, value_scheme, ROWS, ROWS,
    )  # fmt: skip


def outside_window(
    codes: Tensor,
    scale: Tensor,
    codebook: Tensor,
    scheme: VQScheme,
    mean: Tensor | None,
    tail: Tensor,
    sinks: Tensor,
    start: Tensor | None,
    tail_start: int,
) -> Tensor:
    """Every key (or value) as a query sees it that has it outside its window: [B, H, total, D].

    Sinks are floats, and so are the tokens at the end that have no code yet.

    Args:
        codes: canonical rows of positions 0, 1, ...
        scale: theirs.
    """
    dim, coded, slots = tail.shape[-1], codes.shape[2], sinks.shape[2]
    rows = reference.decode(
        codes, codebook, scale, None, None, None, None, None, scheme, dim
    )  # fmt: skip
    rows = rows if mean is None else rows + mean.float()
    rows = torch.cat([rows, tail[:, :, coded - tail_start :].float()], 2)
    if slots == 0:
        return rows
    if start is None:
        slots = min(slots, rows.shape[2])
        rows[:, :, :slots] = sinks[:, :, :slots].float()
        return rows
    slot = torch.arange(rows.shape[2], device=rows.device) - start[:, None]  # [B, total]
    index = slot.clamp(0, slots - 1)[:, None, :, None].expand(-1, rows.shape[1], -1, dim)
    is_sink = ((slot >= 0) & (slot < slots))[:, None, :, None]
    return torch.where(is_sink, sinks.float().gather(2, index), rows)


def softmax(
    scores: Tensor, mask: Tensor | None, softcap: float = 0.0, s_aux: Tensor | None = None
) -> Tensor:
    """Attention weights of float32 scores [B, Hq, Q, total]; a query that sees nothing gets zeros.

    Args:
        mask: bool (True = may attend) or additive, broadcastable, at least `total` long; None is
            causal with the last query at the last key.
        softcap: c of c tanh(s / c), Gemma 2; 0 = off.
        s_aux: one more logit per query head [Hq] that attends to nothing, GPT-OSS.
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
    if s_aux is not None:
        sink = s_aux.float().reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], -1)
    return scores.softmax(-1)[..., :total].nan_to_num(0.0)
