"""Caches of random codes and floats, and what attention over them is in float64.

What must not be read is poison: scales that are no numbers, pages that no memory has.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_vq.cache.key_means import Calibrated
from hf_vq.formats.catalog import KVScheme
from hf_vq.formats.packing import packed_size
from hf_vq.formats.scheme import VQScheme
from hf_vq.ops import KVCacheView, KVSide
from hf_vq.ops.kv import PAGED, STATIC
from hf_vq.ops.layout import ROWS
from hf_vq.ops.reference import codes as reference
from hf_vq.serving.batch import Table
from hf_vq.serving.pages import LayerPages, PageFormat, PageSide

from .case import kv_codebook

_AT_A_TIME = 1 << 25  # numbers of keys, for which float64 is computed
_BESIDE = 3  # tokens of a tape that are not the cache's
_POOL = 8192  # tokens of the pages that requests share, at most
_USUAL = 1000  # tokens of requests that are not the longest


def scales_of(scheme: VQScheme, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """As large as those of rows of unit variance, or around zero."""
    scale = torch.rand(*shape, scheme.row_numbers, device=device) + 0.5
    if scheme.has_zero:
        scale[..., 0] /= 4
        scale[..., 1] = 10 * scale[..., 1] - 2.5
    return scale.half()


def _codes(scheme: VQScheme, dim: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    width = packed_size(dim // scheme.vector_size, scheme.entry_bits)
    return torch.randint(256, (*shape, width), dtype=torch.uint8, device=device)


def _mean(scheme: KVScheme, rows: int, heads: int, dim: int, device: torch.device) -> Tensor | None:
    return torch.randn(rows, heads, 1, dim, device=device) if scheme.centre_keys else None


def tape(
    scheme: KVScheme,
    dtype: torch.dtype,
    device: torch.device,
    rows: int,
    heads: int,
    dims: tuple[int, int],
    tokens: int,
    queries: int,
    sinks: int,
    window: int,
) -> KVCacheView:
    """`tokens` with codes, and `window` more."""
    # Older floats are there, but are read as codes.
    tail = min(window + queries + 5, tokens + window)
    first, shape = 1, (rows, heads, 1 + tokens + _BESIDE)

    def floats(count: int, dim: int) -> Tensor:  # views whose tokens do not lie side by side
        whole = torch.randn(rows, count, heads, dim + 8, device=device, dtype=dtype)
        return whole.transpose(1, 2)[..., :dim]

    def side(part: VQScheme, dim: int, mean: Tensor | None) -> KVSide:
        scale = scales_of(part, shape, device)
        scale[:, :, :first] = scale[:, :, first + tokens :] = torch.nan
        codes, book = _codes(part, dim, shape, device), kv_codebook(part, heads, dim, device)
        some = floats(sinks, dim), floats(tail, dim)
        return KVSide(codes, scale, book, mean, *some, first, part.spec(), ROWS)

    mean = _mean(scheme, rows, heads, dims[0], device)
    return KVCacheView(
        side(scheme.key, dims[0], mean), side(scheme.value, dims[1], None), None, None, None, None,
        tokens + window, window, queries, tokens,
    )  # fmt: skip


def static(
    scheme: KVScheme,
    dtype: torch.dtype,
    device: torch.device,
    rows: int,
    heads: int,
    dims: tuple[int, int],
    tokens: int,
    queries: int,
    sinks: int,
    window: int,
) -> KVCacheView:
    """Room for `tokens`, of which there are some fewer."""
    shape, length = (rows, heads, tokens), tokens - 7

    slots = window + queries

    def side(part: VQScheme, dim: int, mean: Tensor | None) -> KVSide:
        scale = scales_of(part, shape, device)
        scale[:, :, length - window :] = torch.nan
        codes, book = _codes(part, dim, shape, device), kv_codebook(part, heads, dim, device)
        sink, ring = (
            torch.randn(rows, heads, count, dim, device=device).to(dtype)
            for count in (sinks, slots)
        )
        return KVSide(codes, scale, book, mean, sink, ring, 0, part.spec(), ROWS)

    mean = _mean(scheme, rows, heads, dims[0], device)
    return KVCacheView(
        side(scheme.key, dims[0], mean), side(scheme.value, dims[1], None), None,
        torch.full((), length, dtype=torch.int64, device=device), None, None, tokens, window, 0, 0,
    )  # fmt: skip


def pages(
    scheme: KVScheme,
    dtype: torch.dtype,
    device: torch.device,
    rows: int,
    heads: int,
    dim: int,
    longest: int,
    page: int,
) -> KVCacheView:
    """Requests of all lengths up to `longest`; pages lie in any order, and requests share them."""
    keys, values = (PageSide(part, ROWS, heads, dim, page) for part in (scheme.key, scheme.value))
    form = PageFormat(keys, values, tables=True)
    count = max(2, min(_POOL, longest) // page)
    memory = torch.randint(256, (count, form.nbytes), dtype=torch.uint8, device=device)
    books = (
        kv_codebook(scheme.key, heads, dim, device),
        kv_codebook(scheme.value, heads, dim, device),
    )
    mean = torch.randn(heads, dim, device=device) if scheme.centre_keys else None
    factors = torch.exp(torch.randn(heads, dim, device=device) / 2)
    known = None if mean is None else Calibrated(mean, smoothing=factors)
    layer = LayerPages(memory, form, books, known)
    for part, of in ((layer.k, scheme.key), (layer.v, scheme.value)):
        part.scale.copy_(scales_of(of, (count, heads, page), device))
    lengths = torch.randint(1, min(_USUAL, longest) + 1, (rows,))
    lengths[-1] = 1
    lengths[0] = longest
    width = -(-longest // page)
    table = torch.randint(count, (rows, width), dtype=torch.int32, device=device)
    like = torch.empty(0, device=device, dtype=dtype)
    return layer.through(Table(table, lengths.to(device), longest), like)


class Turning(NamedTuple):
    """A rotary mean, and how it turns (`KVCacheView`)."""

    mean: Tensor
    inv_freq: Tensor
    interleaved: bool
    start: int

    def added_to(self, cached: KVCacheView) -> KVCacheView:
        """A cache whose keys have it."""
        return cached._replace(
            key_rotary_mean=self.mean, rotary_inv_freq=self.inv_freq,
            rotary_interleaved=self.interleaved, rotary_start=self.start,
        )  # fmt: skip

    def at(self, positions: Tensor) -> Tensor:
        """R_n m of tokens at `positions` [n], by complex numbers: [B, H, n, D] float64."""
        mean, count = self.mean.double(), 2 * len(self.inv_freq)
        shape = (-1, 2) if self.interleaved else (2, -1)
        of_pair = -1 if self.interleaved else -2
        one, other = mean[..., :count].unflatten(-1, shape).unbind(of_pair)
        angle = (positions.double() + self.start)[:, None] * self.inv_freq.double()
        both = torch.complex(one, other) * torch.polar(torch.ones_like(angle), angle)
        parts = torch.stack([both.real, both.imag], of_pair).flatten(-2)
        return torch.cat([parts, mean[..., count:].expand(*parts.shape[:-1], -1)], -1)


def turning(rows: int, heads: int, dim: int, device: torch.device, size: float = 2.0) -> Turning:
    """A random one: one pair of channels of a head holds about 200, others about `size`, and the
    last of several heads nothing, nor do pairs that do not turn, which may be most, and the one;
    positions go up to 100,000 and more."""
    partly, sparse, interleaved, start = (int(torch.randint(n, ())) for n in (2, 2, 2, 100_001))
    pairs = dim // 2 if not partly else max(dim // 8 * 3 // 2, 1)
    mean = size * torch.randn(rows, heads, 1, dim, device=device)
    mean[..., 1:2] = 200 * torch.rand(rows, heads, 1, 1, device=device)
    if heads > 1:
        mean[:, -1] = 0
    mean[..., 2 * pairs :] = 0
    if sparse:  # of each head other pairs, and another number of them
        some = torch.rand(rows, heads, 1, pairs, device=device)
        some = some < 0.4 * torch.rand(rows, heads, 1, 1, device=device)
        both = some.repeat_interleave(2, -1) if interleaved else torch.cat([some, some], -1)
        mean[..., : 2 * pairs] *= both
    steps = torch.arange(pairs, dtype=torch.float64, device=device) / pairs
    return Turning(mean, (10_000.0**-steps).float(), bool(interleaved), start)


def turning_of(cached: KVCacheView) -> Turning | None:
    """What keys of a cache have, if anything."""
    mean, inv_freq = cached.key_rotary_mean, cached.rotary_inv_freq
    if mean is None or inv_freq is None:
        return None
    return Turning(mean, inv_freq, cached.rotary_interleaved, cached.rotary_start)


def turned(cached: KVCacheView, tokens: int, rows: slice) -> Tensor | float:
    """R_n m of the first tokens: [B, H, n, D] float64; 0 without."""
    means = turning_of(cached)
    if means is None:
        return 0.0
    means = means._replace(mean=means.mean[rows if len(means.mean) > 1 else slice(0, 1)])
    return means.at(torch.arange(tokens, device=means.mean.device))


def largest_value(cached: KVCacheView) -> Tensor:
    """Of the floats among the values; of codes, that of their scales."""
    floats = (
        cached.value.scale.float().nan_to_num(0) if cached.memory == PAGED else cached.value.recent
    )
    return floats.abs().max().double() if floats.numel() else torch.zeros((), device=floats.device)


def exact(
    query: Tensor, cached: KVCacheView, mask: Tensor | None, *, softmax_scale: float, softcap: float
) -> Tensor:
    """What attention is, in float64 over codes that are decoded: [B, Hq, Q, Dv]."""
    some = (
        _of_request(query[row : row + 1], cached, row, softmax_scale, softcap)
        if cached.memory == PAGED
        else _of_rows(query, cached, mask, row, softmax_scale, softcap)
        for row in _rows(query, cached)
    )
    return torch.cat(list(some))


def _rows(query: Tensor, cached: KVCacheView) -> range:
    """The first row of each part that is computed at a time."""
    if cached.memory == PAGED:
        return range(len(query))
    return range(0, len(query), _rows_at_a_time(cached))


def _rows_at_a_time(cached: KVCacheView) -> int:
    _, heads, tokens, _ = cached.key.codes.shape
    dim = cached.key.recent.shape[3] + cached.value.recent.shape[3]
    return max(1, _AT_A_TIME // (heads * tokens * dim))


def _decoded(codes: Tensor, scale: Tensor, codebook: Tensor, scheme: VQScheme, dim: int) -> Tensor:
    """Rows, rotated back: entries and scales are exact in float32, products are not."""
    if scheme.has_scale and not scheme.has_zero:
        ones = torch.ones_like(scale)
        rows = reference.decode_rotated(codes, codebook, ones, scheme, dim).double()
        rows = rows * scale.double()
    else:
        rows = reference.decode_rotated(codes, codebook, scale, scheme, dim).double()
    return reference.rotate(rows, None, scheme, True)


def _of_request(
    query: Tensor, cached: KVCacheView, row: int, softmax_scale: float, softcap: float
) -> Tensor:
    assert cached.cache_seqlens is not None and cached.page_table is not None
    length = int(cached.cache_seqlens[row])
    _, heads, page, _ = cached.key.codes.shape
    numbers = cached.page_table[row, : -(-length // page)].long()

    def rows(side: KVSide) -> Tensor:
        codes, scale = (
            x[numbers].transpose(0, 1).flatten(1, 2)[None, :, :length]
            for x in (side.codes, side.scale)
        )
        found = _decoded(codes, scale, side.codebook, side.parsed, query.shape[3])
        found = found if side.smoothing is None else found / side.smoothing.double()
        return found if side.mean is None else found + side.mean.double()

    keys, values = rows(cached.key), rows(cached.value)
    keys = keys + turned(cached, length, slice(row, row + 1))
    none = keys.new_zeros(1, heads, 0, 1)
    near = torch.zeros(query.shape[2], length, dtype=torch.bool, device=query.device)
    return _attended(query, keys, values, none, none, near, None, softmax_scale, softcap)


def _of_rows(
    query: Tensor,
    cached: KVCacheView,
    mask: Tensor | None,
    row: int,
    softmax_scale: float,
    softcap: float,
) -> Tensor:
    rows = slice(row, row + _rows_at_a_time(cached))
    queries, sinks, window = query.shape[2], cached.key.sinks.shape[2], cached.window
    tails: tuple[Tensor, ...] = (cached.key.recent[rows], cached.value.recent[rows])
    if cached.memory == STATIC:
        assert cached.cache_seqlens is not None
        total, slots = int(cached.cache_seqlens), cached.key.recent.shape[2]
        begin, coded, fresh = total - slots, total - window, queries
        place = torch.arange(begin, total, device=query.device) % slots
        tails = tuple(part[:, :, place] for part in tails)
        firsts = (0, 0)
    else:
        total, begin = cached.max_seqlen, cached.recent_start
        coded, fresh = cached.num_coded, cached.num_new
        firsts = (cached.key.first, cached.value.first)
    far: list[Tensor] = []
    for side, tail, first in zip((cached.key, cached.value), tails, firsts, strict=True):
        some = slice(first, first + coded)
        codes, scale = side.codes[rows, :, some], side.scale[rows, :, some]
        part = _decoded(codes, scale, side.codebook, side.parsed, tail.shape[3])
        if side.smoothing is not None:
            part = part / side.smoothing[rows].double()
        if side.mean is not None:
            part = part + side.mean[rows].double()
        if side is cached.key:
            part = part + turned(cached, coded, rows)
        part = torch.cat([part, tail[:, :, coded - begin :].double()], 2)
        part[:, :, :sinks] = side.sinks[rows].double()
        far.append(part)
    i = torch.arange(total - queries, total, device=query.device)[:, None]
    j = torch.arange(total, device=query.device)
    near = ((j > i - window) | (j >= total - fresh)) & (j >= begin)
    tail_k, tail_v = (tail.double() for tail in tails)
    shown = None if mask is None else mask[..., :total]
    return _attended(
        query[rows], far[0], far[1], tail_k, tail_v, near, shown, softmax_scale, softcap
    )


def _attended(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tail_k: Tensor,
    tail_v: Tensor,
    near: Tensor,
    mask: Tensor | None,
    softmax_scale: float,
    softcap: float,
) -> Tensor:
    """Attention to keys and values [B, H, n, D], of which the last are those of the tail where
    `near` [Q, n] says so."""
    rows, heads, queries, dim = query.shape
    kv_heads, total, slots = keys.shape[1], keys.shape[2], tail_k.shape[2]
    near = near.repeat(heads // kv_heads, 1)
    grouped = query.double().reshape(rows, kv_heads, -1, dim)
    scores = grouped @ keys.mT
    if slots:
        tail = torch.where(near[:, total - slots :], grouped @ tail_k.mT, scores[..., -slots:])
        scores = torch.cat([scores[..., :-slots], tail], -1)
    scores = scores.reshape(rows, heads, queries, total) * softmax_scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None:
        shown = torch.ones(queries, total, dtype=torch.bool, device=query.device)
        mask = shown.tril(total - queries)
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    else:
        scores = scores + mask.double()
    weights = scores.softmax(-1).nan_to_num(0).reshape(rows, kv_heads, -1, total)
    out = weights.masked_fill(near, 0) @ values
    if slots:
        out = out + (weights * near)[..., -slots:] @ tail_v
    return out.reshape(rows, heads, queries, -1)
