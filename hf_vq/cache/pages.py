"""Pages: the codes of a fixed number of tokens each, which the requests of a server share.

One layer's page of T tokens, H key/value heads; every part begins at a multiple of 16 bytes:

    [ keys: codes | scales ][ values: codes | scales ]

    codes    uint8 [H, T, bytes]         in rows, or [H, T / 256, bytes] in blocks (`ops.layout`)
    scales   fp16 [numbers, H, T]        no number, one, or a scale and a zero for each row

Pages hold codes only, no sinks and no window: every query reads every token as codes, its own
too, and the layer's mean of the keys is known before the first request. So a token's codes depend
on the token alone, and what a request gets does not depend on how its prompt was cut, who shares
its pages, who came before it, or whether it was evicted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..formats.catalog import KVScheme
from ..formats.packing import packed_size
from ..formats.scheme import VQScheme
from ..ops import append_kv
from ..ops.attention import CachedKV, without_autocast
from ..ops.codes import decode_kv
from ..ops.layout import BLOCK, ROWS, block_bytes, layouts_for, to_rows
from ..ops.paged import PagedKV, append_paged, through_tables

ALIGNMENT = 16  # bytes: of the widest load


Tape = tuple[Tensor, Tensor]
"""Codes uint8 [requests, H, tokens, bytes], or blocks, and scales fp16 [requests, H, tokens,
numbers]."""


@dataclass(frozen=True)
class PageSide:
    """Keys, or values, of a page.

    Args:
        scheme: how a row of `dim` numbers is coded.
        layout: of the codes.
        heads: key/value heads.
        dim: numbers of a row.
        tokens: of a page.
    """

    scheme: VQScheme
    layout: str
    heads: int
    dim: int
    tokens: int

    @cached_property
    def codes(self) -> tuple[int, ...]:
        """Shape of a page's codes, in bytes."""
        vectors = self.dim // self.scheme.vector_size
        if self.layout == ROWS:
            return self.heads, self.tokens, packed_size(vectors, self.scheme.entry_bits)
        blocks = self.tokens // BLOCK
        return self.heads, blocks, block_bytes(vectors, self.scheme.entry_bits)

    @cached_property
    def scales(self) -> tuple[int, ...]:
        """Shape of a page's scales, in fp16 numbers."""
        return self.scheme.row_numbers, self.heads, self.tokens

    @cached_property
    def parts(self) -> tuple[int, int]:
        """Bytes of the codes and of the scales, with what aligns them."""
        return _aligned(math.prod(self.codes)), _aligned(2 * math.prod(self.scales))


@dataclass(frozen=True)
class PageFormat:
    """A page of one layer: its keys, then its values.

    Args:
        keys: how keys lie there.
        values: how values lie there.
        tables: whether kernels read and write pages where they are (`ops.paged`); else codes are
            copied side by side before they are read.
    """

    keys: PageSide
    values: PageSide
    tables: bool

    @classmethod
    def of(cls, scheme: KVScheme, heads: int, dim: int, tokens: int, like: Tensor) -> PageFormat:
        """The format whose layouts the kernels for `like` (device and dtype of the queries) want;
        rows, where a page is not made of whole blocks.
        """
        layouts = layouts_for(scheme.key, scheme.value, dim, dim, like)
        if tokens % BLOCK:
            layouts = ROWS, ROWS
        keys = PageSide(scheme.key, layouts[0], heads, dim, tokens)
        values = PageSide(scheme.value, layouts[1], heads, dim, tokens)
        rows = layouts == (ROWS, ROWS)
        tables = rows and through_tables(scheme.key, scheme.value, dim, tokens, like)
        return cls(keys, values, tables)

    @property
    def nbytes(self) -> int:
        """Bytes of a page."""
        return sum(self.keys.parts) + sum(self.values.parts)


class Request:
    """What a forward computes of one request.

    Args:
        first: row of its first new token in the batch.
        past: tokens that it has in its pages.
        new: tokens that come now.
        pages: numbers of its pages, those of the new tokens included.
    """

    def __init__(self, first: int, past: int, new: int, pages: Sequence[int]) -> None:
        self.first, self.past, self.new, self.pages = first, past, new, list(pages)

    @property
    def length(self) -> int:
        """Tokens with the new ones."""
        return self.past + self.new

    @property
    def rows(self) -> slice:
        """Its new tokens in the batch."""
        return slice(self.first, self.first + self.new)


@dataclass(frozen=True)
class Table:
    """Requests that have one new token each, and where their pages are, on the device.

    Args:
        pages: int32 [requests, width], in the order of the tokens.
        length: int64 [requests], tokens with the new one; 0 = there is no request.
        longest: no request has more tokens.
        rows: their new tokens in the batch int64 [requests]; None = all of it, in order.
    """

    pages: Tensor
    length: Tensor
    longest: int
    rows: Tensor | None = None

    def slots(self, tokens: int, trash: int) -> Tensor:
        """Where the new tokens go (`ops.paged`): int64 [requests].

        Args:
            tokens: of a page.
            trash: a slot for those of no request.
        """
        position = (self.length - 1).clamp_min(0)
        page = self.pages.gather(1, (position // tokens)[:, None])[:, 0]
        return torch.where(self.length > 0, page * tokens + position % tokens, trash)


class Group:
    """Requests that read their pages at once: one, or several that have one new token each, which
    are right-aligned to the longest.

    Args:
        requests: of the group.
        tokens: of a page.
        device: of the pages.
    """

    def __init__(self, requests: Sequence[Request], tokens: int, device: torch.device) -> None:
        self.requests, self.tokens, self.device = list(requests), tokens, device
        self.length = max(request.length for request in requests)
        self.new, self.past = requests[0].new, self.length - requests[0].new

    @cached_property
    def table(self) -> Tensor:
        """The pages int64 [requests, most pages], those that a request lacks 0."""
        width = max(len(request.pages) for request in self.requests)
        rows = [request.pages + [0] * (width - len(request.pages)) for request in self.requests]
        return _on(self.device, rows)

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """Page and place in it of every token, any where there is none: int64 [requests, 1,
        length] each."""
        lengths = [request.length for request in self.requests]
        shift = self.length - _on(self.device, lengths)[:, None]
        position = (torch.arange(self.length, device=self.device) - shift).clamp_min_(0)
        page = self.table.gather(1, position // self.tokens)
        return page[:, None], (position % self.tokens)[:, None]

    @cached_property
    def mask(self) -> Tensor | None:
        """bool [requests, 1, 1, length], True = is a token; None where all are."""
        if all(request.length == self.length for request in self.requests):
            return None
        lengths = _on(self.device, [request.length for request in self.requests])
        position = torch.arange(self.length, device=self.device)
        return position >= (self.length - lengths)[:, None, None, None]

    @cached_property
    def rows(self) -> Tensor:
        """The new tokens in the batch int64 [requests, new]."""
        rows = [list(range(each.first, each.rows.stop)) for each in self.requests]
        return _on(self.device, rows)


class Batch:
    """The requests of one forward.

    Args:
        tokens: of a page.
        device: of the pages.
    """

    def __init__(self, tokens: int, device: torch.device) -> None:
        self.requests: list[Request] = []
        self.tokens, self.device = tokens, device
        self._windows: dict[int, list[tuple[slice, Tensor | None]]] = {}

    def add(self, past: int, new: int, pages: Sequence[int]) -> None:
        """One more request: `new` tokens, at least one, behind `past` ones, in `pages`."""
        first = self.requests[-1].rows.stop if self.requests else 0
        self.requests.append(Request(first, past, new, pages))

    @cached_property
    def spans(self) -> list[tuple[slice, int, int]]:
        """New tokens that go to one page: their rows in the batch, the page, their place in it."""
        spans = []
        for request in self.requests:
            at = request.past
            while at < request.length:
                page, place = divmod(at, self.tokens)
                end = min(at + self.tokens - place, request.length)
                first = request.first - request.past
                spans.append((slice(first + at, first + end), request.pages[page], place))
                at = end
        return spans

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """Page and place in it of every new token int64 [new tokens]."""
        rows = [(page, place + i) for span, page, place in self.spans for i in range(_size(span))]
        page, place = _on(self.device, rows).unbind(1)
        return page, place

    def windows(self, window: int) -> list[tuple[slice, Tensor | None]]:
        """What layers of sliding attention read of each request, which lie one after another: at
        most window - 1 tokens of the past and the new ones; and which of them each new one sees,
        bool [1, 1, new, read], None for a single one, which sees all. Made once for all layers.
        """
        if window not in self._windows:
            found: list[tuple[slice, Tensor | None]] = []
            begin = 0
            for request in self.requests:
                count = request.new + min(request.past, window - 1)
                mask = None
                if request.new > 1:
                    j = torch.arange(count, device=self.device)
                    i = j[count - request.new :, None]
                    mask = ((j <= i) & (j > i - window))[None, None]
                found.append((slice(begin, begin + count), mask))
                begin += count
            self._windows[window] = found
        return self._windows[window]

    @cached_property
    def alone(self) -> list[Group]:
        """Every request in a group of its own."""
        return [Group([request], self.tokens, self.device) for request in self.requests]

    @cached_property
    def table(self) -> Table | None:
        """All requests with one new token; None: there is none."""
        ones = [request for request in self.requests if request.new == 1]
        if not ones:
            return None
        width = max(len(request.pages) for request in ones)
        pages = [request.pages + [-1] * (width - len(request.pages)) for request in ones]
        lengths = [request.length for request in ones]
        return Table(
            _on(self.device, pages, torch.int32), _on(self.device, lengths), max(lengths),
            _on(self.device, [request.first for request in ones]),
        )  # fmt: skip

    @cached_property
    def longer(self) -> list[Group]:
        """Every request with several new tokens, in a group of its own."""
        longer = [request for request in self.requests if request.new > 1]
        return [Group([request], self.tokens, self.device) for request in longer]

    @cached_property
    def together(self) -> list[Group]:
        """Requests with one new token in groups of about one length, all others alone."""
        groups: dict[int, list[Request]] = {}
        for request in self.requests:
            one = request.new == 1 and request.past > 0
            key = len(request.pages).bit_length() if one else -1 - request.first
            groups.setdefault(key, []).append(request)
        return [Group(each, self.tokens, self.device) for each in groups.values()]


class Pages:
    """The keys, or the values, of one layer in all pages.

    Args:
        memory: uint8 [pages, bytes of this side]; may be a view.
        side: what lies there.
        codebook: as for `ops.encode_kv`, on the device of the memory.
    """

    def __init__(self, memory: Tensor, side: PageSide, codebook: Tensor) -> None:
        self.side, self.codebook, self.spec = side, codebook, side.scheme.spec()
        first, second = memory.split(side.parts, 1)
        self.codes = first[:, : math.prod(side.codes)].view(-1, *side.codes)
        scales = second[:, : 2 * math.prod(side.scales)].view(torch.float16)
        self.scale = scales.view(len(memory), *side.scales).permute(0, 2, 3, 1)
        wide = self.codes.shape[3] % 8 == 0  # rows are gathered eight bytes at a time
        self.words = self.codes.view(torch.int64) if wide else self.codes
        self.heads = torch.arange(side.heads, device=memory.device)[:, None]

    def write(self, x: Tensor, mean: Tensor | None, batch: Batch) -> None:
        """Encode the new tokens of a batch, x - mean of x [1, H, new tokens, dim]."""
        layout = self.side.layout
        if layout != ROWS:
            for rows, number, at in batch.spans:
                codes, scale = self.codes[number][None], self.scale[number][None]
                part = x[:, :, rows]
                append_kv(part, mean, self.codebook, codes, scale, at, self.spec, layout)
            return
        count = x.shape[2]
        codes = self.codes.new_empty(1, self.side.heads, count, self.codes.shape[3])
        scale = self.scale.new_empty(1, self.side.heads, count, self.scale.shape[3])
        append_kv(x, mean, self.codebook, codes, scale, 0, self.spec, layout)
        page, place = batch.places
        self.codes[page, :, place] = codes[0].transpose(0, 1)
        self.scale[page, :, place] = scale[0].transpose(0, 1)

    def read(self, group: Group) -> Tape:
        """A copy of a group's codes and scales, one tape for each request."""
        if self.side.layout == ROWS:
            page, place = group.places
            words = self.words[page, self.heads, place]
            return words.view(torch.uint8), self.scale[page, self.heads, place]
        pages = group.table[0]
        codes, scale = self.codes.index_select(0, pages), self.scale.index_select(0, pages)
        return codes.transpose(0, 1).flatten(1, 2)[None], scale.transpose(0, 1).flatten(1, 2)[None]

    def decode(
        self, tape: Tape, mean: Tensor | None, first: int, count: int, dtype: torch.dtype
    ) -> Tensor:
        """`count` tokens from `first` on of tapes that were read: [requests, H, count, dim]."""
        scheme = self.side.scheme
        rows = to_rows(tape[0], first, count, scheme.entry_bits, self.side.layout)
        with without_autocast(rows.device):
            scale = tape[1][:, :, first : first + count]
            x = decode_kv(rows, scale, self.codebook, scheme, self.side.dim)
            return (x if mean is None else x + mean).to(dtype)


class LayerPages:
    """One layer in all pages.

    Args:
        memory: uint8 [pages, bytes of a page of this layer]; may be a view.
        page: what lies there.
        codebooks: of the keys and of the values.
        mean: of the keys, float32 [H, dim]; None = 0.
    """

    def __init__(
        self,
        memory: Tensor,
        page: PageFormat,
        codebooks: tuple[Tensor, Tensor],
        mean: Tensor | None,
    ) -> None:
        keys, values = memory.split([sum(page.keys.parts), sum(page.values.parts)], 1)
        self.k = Pages(keys, page.keys, codebooks[0])
        self.v = Pages(values, page.values, codebooks[1])
        self.mean = None if mean is None else mean.to(memory.device, torch.float32)[None, :, None]

    def put(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Encode keys and values [1, H, n, dim] where they belong, by kernels: as `write`, of pages
        with tables.

        Args:
            slots: of the tokens (`ops.paged`).
        """
        append_paged(
            keys, self.mean, self.k.codebook, self.k.codes, self.k.scale, slots, self.k.spec
        )
        append_paged(values, None, self.v.codebook, self.v.codes, self.v.scale, slots, self.v.spec)

    def through(self, table: Table) -> PagedKV:
        """What attention reads of requests with one new token each, where it is."""
        return PagedKV(
            self.k.codes, self.k.scale, self.mean, self.v.codes, self.v.scale, self.k.codebook,
            self.v.codebook, table.pages, table.length, table.longest, self.k.spec, self.v.spec,
        )  # fmt: skip

    def write(self, keys: Tensor, values: Tensor, batch: Batch) -> None:
        """Encode the new tokens of a batch: keys and values [1, H, new tokens, dim]."""
        self.k.write(keys, self.mean, batch)
        self.v.write(values, None, batch)

    def groups(self, batch: Batch) -> list[Group]:
        """The requests that are read at once: codes in blocks cannot be aligned with each other."""
        rows = self.k.side.layout == self.v.side.layout == ROWS
        return batch.together if rows else batch.alone

    def read(self, group: Group, like: Tensor) -> CachedKV:
        """What attention reads of a group. The new tokens are floats, but what their codes say; one
        new token that a kernel of blocks will read is left to it.

        Args:
            like: a query, decides the dtype.
        """
        keys, values = self.k.read(group), self.v.read(group)
        first, new = group.past, group.new
        if new == 1 and self.k.side.layout != ROWS and self.v.side.layout != ROWS:
            first, new = group.length, 0
        tail_k = self.k.decode(keys, self.mean, first, new, like.dtype)
        tail_v = self.v.decode(values, None, first, new, like.dtype)
        mean = None if self.mean is None else self.mean.expand(len(tail_k), -1, -1, -1)
        return CachedKV(
            tail_k[:, :, :0], tail_v[:, :, :0], *keys, mean, *values, tail_k, tail_v,
            self.k.codebook, self.v.codebook, None, first, 0, new, first, 0, 0,
            self.k.spec, self.v.spec, self.k.side.layout, self.v.side.layout,
        )  # fmt: skip


def _on(device: torch.device, values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
    """Numbers on a device; the host does not wait for it."""
    found = torch.tensor(values, dtype=dtype)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _size(span: slice) -> int:
    return int(span.stop - span.start)
