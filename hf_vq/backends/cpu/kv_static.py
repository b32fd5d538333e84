"""`store` and `attention_static` on the CPU, where a host knows what a tensor holds: the length is
read, and then `append` and `attention` do what they do for a cache that grows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...dispatch import Implementation
from ...formats.scheme import VQScheme
from ...ops import append_kv
from ...ops.attention import CachedKV, attention
from ...ops.reference import kv_static as static_reference
from . import kv as cpu_attention


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
    """`ops.static_reference.store`; the codes of a token are those of `append`."""
    first, new = int(length), keys.shape[2]
    slots, sinks = tail_k.shape[2], sink_k.shape[2]
    for tokens, tail in ((keys, tail_k), (values, tail_v)):
        for begin, slot, count in _pieces(first, first + new, slots):
            tail.narrow(2, slot, count).copy_(tokens.narrow(2, begin - first, count))
    if first < sinks + (0 if start is None else int(start.max())):
        static_reference.remember_sinks(keys, sink_k, start, length)
        static_reference.remember_sinks(values, sink_v, start, length)
    end = first + new - window
    if k_mean is not None and frozen is not None and end > sinks and not frozen.all():
        last = length + (new - window)
        static_reference.freeze_mean(tail_k, k_mean, frozen, start, last, sinks, window)
    leaving = max(first - window, 0), min(end, k_scale.shape[2])
    for begin, slot, count in _pieces(*leaving, slots):
        append_kv(
            tail_k.narrow(2, slot, count), k_mean, codebook_k, k_codes, k_scale, begin,
            key_scheme.spec(), key_layout,
        )  # fmt: skip
        append_kv(
            tail_v.narrow(2, slot, count), None, codebook_v, v_codes, v_scale, begin,
            value_scheme.spec(), value_layout,
        )  # fmt: skip
    length += new


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
    """`ops.attention.attention` of the tokens held; the window is copied where the ring ends."""
    total, fresh = int(length), query.shape[2]
    tail_start = max(total - fresh - max(window - 1, 0), 0)
    coded = min(max(total - window, 0), k_scale.shape[2])
    if mask is not None and fresh == 1 and mask.dtype == torch.bool and mask[..., :total].all():
        mask = None  # the usual one: of a token that sees all of them
    cached = CachedKV(
        sink_k, sink_v, k_codes, k_scale, k_mean, v_codes, v_scale,
        _in_order(tail_k, tail_start, total), _in_order(tail_v, tail_start, total),
        codebook_k, codebook_v, start if start is not None and start.any() else None,
        tail_start, window, fresh, coded, 0, 0,
        key_scheme.spec(), value_scheme.spec(), key_layout, value_layout,
    )  # fmt: skip
    return attention(query, cached, scaling=scaling, mask=mask, softcap=softcap, s_aux=s_aux)


def _pieces(begin: int, end: int, slots: int) -> Iterator[tuple[int, int, int]]:
    """Positions begin .. end - 1 as (position, slot of the ring, tokens that lie behind it)."""
    while begin < end:
        slot = begin % slots
        count = min(end - begin, slots - slot)
        yield begin, slot, count
        begin += count


def _in_order(tail: Tensor, begin: int, end: int) -> Tensor:
    """The tokens begin .. end - 1 of a ring, a view where they lie one after another."""
    parts = [tail.narrow(2, slot, count) for _, slot, count in _pieces(begin, end, tail.shape[2])]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


STORE = Implementation(store, cpu_attention.supports_attention)
STATIC = Implementation(attention_static, cpu_attention.supports_attention)
