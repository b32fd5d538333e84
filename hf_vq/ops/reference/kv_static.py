"""The specification of `hf_vq::kv_append` and `kv_attention` of static caches (`ops.kv_ops` says
what they compute): no shape, and no step of the host, depends on what a tensor holds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kv import KVCacheView, KVSide
from ..layout import ROWS, to_rows, write_rows
from ..rotary_mean import measure_means, rotated_key_mean
from . import codes as reference
from .kv_attention import softmax


def kv_append(
    key: Tensor | None, value: Tensor | None, view: KVCacheView, slot_mapping: None = None
) -> None:
    """Append tokens to one layer; arguments as in `ops.kv_ops`."""
    length, window, leftpad = view.cache_seqlens, view.window, view.cache_leftpad
    assert key is not None and value is not None and length is not None
    new = key.shape[2]
    newest = length + torch.arange(new, device=length.device)
    for tokens, side in ((key, view.key), (value, view.value)):
        side.recent.index_copy_(2, newest % side.recent.shape[2], tokens)
        remember_sinks(tokens, side.sinks, leftpad, length)
    mean, known = view.key.mean, view.key_mean_known
    if mean is not None and known is not None:
        measure_mean(view, length + new - window)
    for side in (view.key, view.value):
        _encode(side, newest - window, view)
    length += new


def remember_sinks(tokens: Tensor, sinks: Tensor, leftpad: Tensor | None, length: Tensor) -> None:
    """Keep those of `tokens`, which begin at position `length`, that are sinks."""
    batch, slots = sinks.shape[0], sinks.shape[2]
    first = length.new_zeros(batch) if leftpad is None else leftpad
    index = first[:, None] + torch.arange(slots, device=length.device) - length  # [B, S]
    inside = ((index >= 0) & (index < tokens.shape[2]))[:, None, :, None]
    index = index.clamp(0, tokens.shape[2] - 1)[:, None, :, None].expand_as(sinks)
    sinks.copy_(torch.where(inside, tokens.gather(2, index), sinks))


def measure_mean(view: KVCacheView, end: Tensor) -> None:
    """Decide the means of each row whose first token after the sinks lies before `end`."""
    recent, leftpad, known = view.key.recent, view.cache_leftpad, view.key_mean_known
    mean, rotary_mean, inv_freq = view.key.mean, view.key_rotary_mean, view.rotary_inv_freq
    assert mean is not None and known is not None
    batch, heads, slots, dim = recent.shape
    first = (end.new_zeros(batch) if leftpad is None else leftpad) + view.key.sinks.shape[2]  # [B]
    count = max(view.window // 2, 1)
    positions = first[:, None] + torch.arange(count, device=end.device)
    index = positions % slots
    tokens = recent.gather(2, index[:, None, :, None].expand(batch, heads, count, dim))
    now = (end > first)[:, None] & ~known  # [B, H]
    if rotary_mean is None or inv_freq is None:
        measured = reference.mean_of(tokens)
    else:
        measured, turning = measure_means(
            tokens, positions + view.rotary_start, inv_freq, view.rotary_interleaved
        )
        rotary_mean.copy_(torch.where(now[..., None, None], turning, rotary_mean))
    mean.copy_(torch.where(now[..., None, None], measured, mean))
    known |= now


def _encode(side: KVSide, positions: Tensor, view: KVCacheView) -> None:
    """Encode the tokens at `positions` [n] of the ring that are positions of the buffer."""
    scheme, capacity = side.parsed, side.scale.shape[2]
    held = to_rows(side.codes, 0, capacity, scheme.entry_bits, side.layout)
    rows = side.recent.index_select(2, positions % side.recent.shape[2]).float()
    rows = rows if side.mean is None else rows - side.mean
    if side is view.key and view.key_rotary_mean is not None:
        rows = rows - rotated_key_mean(view, positions)
    rows = rows if side.smoothing is None else rows * side.smoothing
    new_codes, new_scale = reference.encode(rows, side.codebook, None, scheme)
    # Modulo the capacity all are different, and what is not in the buffer is written as it was.
    index = positions % capacity
    valid = ((positions >= 0) & (positions < capacity))[:, None]
    for buffer, new in ((held, new_codes), (side.scale, new_scale)):
        buffer.index_copy_(2, index, torch.where(valid, new, buffer.index_select(2, index)))
    if side.layout != ROWS:  # whose rows are a view
        write_rows(side.codes, 0, held, scheme.entry_bits, side.layout)


def attention(
    query: Tensor,
    view: KVCacheView,
    mask: Tensor | None,
    sink_logits: Tensor | None,
    softmax_scale: float,
    softcap: float,
) -> Tensor:
    """Attention over all of the buffer, in float32; arguments as in `ops.kv_ops`."""
    key, value, length = view.key, view.value, view.cache_seqlens
    assert length is not None
    heads, queries, capacity = key.heads, query.shape[2], key.scale.shape[2]
    j = torch.arange(capacity, device=query.device)
    i = length - queries + torch.arange(queries, device=query.device)[:, None]
    coded = outside_window(key, view, length - view.window)
    near = in_window(key.recent, j, length)

    exact = (j > i - view.window) | (j >= length - queries)  # [Q, capacity]
    grouped = query.float().reshape(query.shape[0], heads, -1, query.shape[-1])  # [B, H, nQ, D]
    exact = exact.repeat(grouped.shape[2] // queries, 1)
    scores = torch.where(exact, grouped @ near.mT, grouped @ coded.mT)
    scores = scores.reshape(*query.shape[:3], capacity) * softmax_scale
    held = j < length
    if mask is None:
        mask = j <= i
    elif mask.dtype == torch.bool:
        mask = mask[..., :capacity] & held
    else:
        mask = mask[..., :capacity].float().masked_fill(~held, -torch.inf)
    weights = softmax(scores, mask, softcap, sink_logits).reshape(*grouped.shape[:3], capacity)

    coded = outside_window(value, view, length - view.window)
    out = (weights * ~exact) @ coded + (weights * exact) @ in_window(value.recent, j, length)
    return reference.in_dtype(out.reshape(*query.shape[:3], -1), query.dtype)


def outside_window(side: KVSide, view: KVCacheView, coded: Tensor) -> Tensor:
    """Keys (or values) as a query sees them outside its window: [B, H, capacity, D] float32, zeros
    from position `coded` on."""
    scheme, (batch, heads, capacity, _), slots = side.parsed, side.scale.shape, side.sinks.shape[2]
    codes = to_rows(side.codes, 0, capacity, scheme.entry_bits, side.layout)
    rows = reference.decode_rows(codes, side.codebook, side.scale, scheme, side.dim)
    rows = rows if side.smoothing is None else rows / side.smoothing
    rows = rows if side.mean is None else rows + side.mean
    j, leftpad = torch.arange(capacity, device=codes.device), view.cache_leftpad
    if side is view.key and view.key_rotary_mean is not None:
        rows = rows + rotated_key_mean(view, j)
    rows = torch.where((j < coded)[:, None], rows, 0.0)
    if slots == 0:
        return rows
    slot = j - (j.new_zeros(batch) if leftpad is None else leftpad)[:, None]  # [B, capacity]
    index = slot.clamp(0, slots - 1)[:, None, :, None].expand(batch, heads, capacity, side.dim)
    is_sink = ((slot >= 0) & (slot < slots))[:, None, :, None]
    return torch.where(is_sink, side.sinks.float().gather(2, index), rows)


def in_window(recent: Tensor, positions: Tensor, length: Tensor) -> Tensor:
    """Floats [B, H, n, D] of the tokens at `positions` [n]; zeros where the ring has none."""
    slots = recent.shape[2]
    held = (positions >= length - slots) & (positions < length)
    return torch.where(held[:, None], recent.index_select(2, positions % slots).float(), 0.0)
