"""The specification of `hf_vq::store` and `hf_vq::attention_static` (`ops.static` says what they
compute): no shape, and no step of the host, depends on what a tensor holds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats.scheme import VQScheme
from ..layout import ROWS, to_rows, write_rows
from . import codes as reference
from .kv_attention import softmax


def store(
    keys: Tensor,
    values: Tensor,
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
    length: Tensor,
    frozen: Tensor | None,
    window: int,
    key_scheme: VQScheme,
    value_scheme: VQScheme,
    key_layout: str,
    value_layout: str,
) -> None:
    """Append tokens to one layer; shapes and meaning in `ops.static`."""
    new = keys.shape[2]
    fresh = length + torch.arange(new, device=length.device)
    for tokens, tail, sinks in ((keys, tail_k, sink_k), (values, tail_v, sink_v)):
        tail.index_copy_(2, fresh % tail.shape[2], tokens)
        remember_sinks(tokens, sinks, start, length)
    if k_mean is not None and frozen is not None:
        freeze_mean(tail_k, k_mean, frozen, start, length + new - window, sink_k.shape[2], window)
    leaving = fresh - window
    _encode(tail_k, k_mean, codebook_k, k_codes, k_scale, leaving, key_scheme, key_layout)
    _encode(tail_v, None, codebook_v, v_codes, v_scale, leaving, value_scheme, value_layout)
    length += new


def remember_sinks(tokens: Tensor, sinks: Tensor, start: Tensor | None, length: Tensor) -> None:
    """Keep those of `tokens`, which begin at position `length`, that are sinks."""
    batch, slots = sinks.shape[0], sinks.shape[2]
    first = length.new_zeros(batch) if start is None else start
    index = first[:, None] + torch.arange(slots, device=length.device) - length  # [B, S]
    inside = ((index >= 0) & (index < tokens.shape[2]))[:, None, :, None]
    index = index.clamp(0, tokens.shape[2] - 1)[:, None, :, None].expand_as(sinks)
    sinks.copy_(torch.where(inside, tokens.gather(2, index), sinks))


def freeze_mean(
    tail: Tensor,
    mean: Tensor,
    frozen: Tensor,
    start: Tensor | None,
    end: Tensor,
    sinks: int,
    window: int,
) -> None:
    """Decide the mean of each row whose first token after the sinks lies before `end`."""
    batch, heads, slots, dim = tail.shape
    first = (end.new_zeros(batch) if start is None else start) + sinks  # [B]
    count = max(window // 2, 1)
    index = (first[:, None] + torch.arange(count, device=end.device)) % slots
    known = tail.gather(2, index[:, None, :, None].expand(batch, heads, count, dim))
    now = (end > first)[:, None] & ~frozen  # [B, H]
    measured = reference.mean_of(known)
    mean.copy_(torch.where(now[..., None, None], measured, mean))
    frozen |= now


def _encode(
    tail: Tensor,
    mean: Tensor | None,
    codebook: Tensor,
    codes: Tensor,
    scale: Tensor,
    positions: Tensor,
    scheme: VQScheme,
    layout: str,
) -> None:
    """Encode the tokens at `positions` [n] of the ring that are positions of the tape."""
    capacity = scale.shape[2]
    held = to_rows(codes, 0, capacity, scheme.entry_bits, layout)
    rows = tail.index_select(2, positions % tail.shape[2]).float()
    new_codes, new_scale = reference.encode(
        rows if mean is None else rows - mean, codebook, None, scheme
    )
    # Modulo the capacity all are different, and what is not on the tape is written as it was.
    index = positions % capacity
    valid = ((positions >= 0) & (positions < capacity))[:, None]
    for tape, fresh in ((held, new_codes), (scale, new_scale)):
        tape.index_copy_(2, index, torch.where(valid, fresh, tape.index_select(2, index)))
    if layout != ROWS:  # whose rows are a view
        write_rows(codes, 0, held, scheme.entry_bits, layout)


def attention_static(
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
    length: Tensor,
    window: int,
    scaling: float,
    softcap: float,
    key_scheme: VQScheme,
    value_scheme: VQScheme,
    key_layout: str,
    value_layout: str,
) -> Tensor:
    """Attention over all of the tape, in float32; shapes and meaning in `ops.static`."""
    heads, queries, capacity = tail_k.shape[1], query.shape[2], k_scale.shape[2]
    k_codes = to_rows(k_codes, 0, capacity, key_scheme.entry_bits, key_layout)
    v_codes = to_rows(v_codes, 0, capacity, value_scheme.entry_bits, value_layout)
    j = torch.arange(capacity, device=query.device)
    i = length - queries + torch.arange(queries, device=query.device)[:, None]
    coded = outside_window(
        k_codes, k_scale, codebook_k, key_scheme, k_mean, sink_k, start, length - window
    )
    near = in_window(tail_k, j, length)

    exact = (j > i - window) | (j >= length - queries)  # [Q, capacity]
    grouped = query.float().reshape(query.shape[0], heads, -1, query.shape[-1])  # [B, H, nQ, D]
    exact = exact.repeat(grouped.shape[2] // queries, 1)
    scores = torch.where(exact, grouped @ near.mT, grouped @ coded.mT)
    scores = scores.reshape(*query.shape[:3], capacity) * scaling
    held = j < length
    if mask is None:
        mask = j <= i
    elif mask.dtype == torch.bool:
        mask = mask[..., :capacity] & held
    else:
        mask = mask[..., :capacity].float().masked_fill(~held, -torch.inf)
    weights = softmax(scores, mask, softcap, s_aux).reshape(*grouped.shape[:3], capacity)

    coded = outside_window(
        v_codes, v_scale, codebook_v, value_scheme, None, sink_v, start, length - window
    )
    out = (weights * ~exact) @ coded + (weights * exact) @ in_window(tail_v, j, length)
    return reference.in_dtype(out.reshape(*query.shape[:3], -1), query.dtype)


def outside_window(
    codes: Tensor,
    scale: Tensor,
    codebook: Tensor,
    scheme: VQScheme,
    mean: Tensor | None,
    sinks: Tensor,
    start: Tensor | None,
    coded: Tensor,
) -> Tensor:
    """Keys (or values) as a query sees them outside its window: [B, H, capacity, D] float32, zeros
    from position `coded` on."""
    batch, heads, capacity, _ = codes.shape
    slots, dim = sinks.shape[2:]
    rows = reference.decode(codes, codebook, scale, None, None, None, None, None, scheme, dim)
    rows = rows if mean is None else rows + mean
    j = torch.arange(capacity, device=codes.device)
    rows = torch.where((j < coded)[:, None], rows, 0.0)
    if slots == 0:
        return rows
    slot = j - (j.new_zeros(batch) if start is None else start)[:, None]  # [B, capacity]
    index = slot.clamp(0, slots - 1)[:, None, :, None].expand(batch, heads, capacity, dim)
    is_sink = ((slot >= 0) & (slot < slots))[:, None, :, None]
    return torch.where(is_sink, sinks.float().gather(2, index), rows)


def in_window(tail: Tensor, positions: Tensor, length: Tensor) -> Tensor:
    """Floats [B, H, n, D] of the tokens at `positions` [n]; zeros where the ring has none."""
    slots = tail.shape[2]
    held = (positions >= length - slots) & (positions < length)
    return torch.where(held[:, None], tail.index_select(2, positions % slots).float(), 0.0)
