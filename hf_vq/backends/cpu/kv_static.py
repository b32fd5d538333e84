"""A static KV cache on the CPU, where a host knows what a tensor holds: the length is read, and
`kv_append` and `kv_attention` then do what they do for a cache that grows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...ops import kv_append, kv_attention
from ...ops.kv import KVCacheView
from ...ops.reference import kv_static as static_reference


def append(key: Tensor, value: Tensor, view: KVCacheView) -> None:
    """`ops.reference.kv_static.kv_append`; the codes of a token are those of a growing cache."""
    length, leftpad, window = view.cache_seqlens, view.cache_leftpad, view.window
    assert length is not None
    first, new = int(length), key.shape[2]
    slots, sinks = view.key.recent.shape[2], view.key.sinks.shape[2]
    sides = (key, view.key), (value, view.value)
    for tokens, side in sides:
        for begin, slot, count in _pieces(first, first + new, slots):
            side.recent.narrow(2, slot, count).copy_(tokens.narrow(2, begin - first, count))
    if first < sinks + (0 if leftpad is None else int(leftpad.max())):
        for tokens, side in sides:
            static_reference.remember_sinks(tokens, side.sinks, leftpad, length)
    end, known = first + new - window, view.key_mean_known
    if view.key.mean is not None and known is not None and end > sinks and not known.all():
        static_reference.measure_mean(view, length + (new - window))
    leaving = max(first - window, 0), min(end, view.max_seqlen)
    for begin, slot, count in _pieces(*leaving, slots):
        keys, values = (side.recent.narrow(2, slot, count) for _, side in sides)
        kv_append(keys, values, view._replace(cache_seqlens=None, num_coded=begin + count))
    length += new


def attention(
    query: Tensor,
    view: KVCacheView,
    mask: Tensor | None,
    sink_logits: Tensor | None,
    softmax_scale: float,
    softcap: float,
) -> Tensor:
    """Attention of the tokens held; the window is copied where the ring ends."""
    total, new, leftpad = int(view.cache_seqlens), query.shape[2], view.cache_leftpad  # type: ignore[arg-type]
    start = max(total - new - max(view.window - 1, 0), 0)
    if mask is not None and new == 1 and mask.dtype == torch.bool and mask[..., :total].all():
        mask = None  # the usual one: of a token that sees all of them
    growing = view._replace(
        key=view.key._replace(recent=_in_order(view.key.recent, start, total)),
        value=view.value._replace(recent=_in_order(view.value.recent, start, total)),
        cache_leftpad=leftpad if leftpad is not None and leftpad.any() else None,
        cache_seqlens=None,
        max_seqlen=total,
        num_new=new,
        num_coded=min(max(total - view.window, 0), view.max_seqlen),
    )
    return kv_attention(
        query, growing, softmax_scale=softmax_scale, mask=mask, softcap=softcap,
        sink_logits=sink_logits,
    )  # fmt: skip


def _pieces(begin: int, end: int, slots: int) -> Iterator[tuple[int, int, int]]:
    """Positions begin .. end - 1 as (position, slot of the ring, tokens that lie behind it)."""
    while begin < end:
        slot = begin % slots
        count = min(end - begin, slots - slot)
        yield begin, slot, count
        begin += count


def _in_order(recent: Tensor, begin: int, end: int) -> Tensor:
    """The tokens begin .. end - 1 of a ring, a view where they lie one after another."""
    parts = [
        recent.narrow(2, slot, count) for _, slot, count in _pieces(begin, end, recent.shape[2])
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)
