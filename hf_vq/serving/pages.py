"""Pages: the codes of a fixed number of tokens each, which the requests of a server share.

One layer's page of T tokens, H key/value heads; every part begins at a multiple of 16 bytes:

    [ keys: codes | scales ][ values: codes | scales ]

    codes    uint8 [H, T, bytes]         in rows, or [H, T / 256, bytes] in blocks (`ops.layout`)
    scales   fp16 [H, T, numbers]        no number, one, or a scale and a zero for each row

Pages hold codes only, no sinks and no window: every query reads every token as codes, its own
too, and the layer's mean of the keys is known before the first request. So a token's codes depend
on the token alone, and what a request gets does not depend on how its prompt was cut, who shares
its pages, who came before it, or whether it was evicted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

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
from ..ops.reference.codes import in_dtype
from .batch import Batch, Group, Prompts, Table

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
        return self.heads, self.tokens, self.scheme.row_numbers

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
        self.scale = scales.view(len(memory), *side.scales)
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

    def read(self, group: Group | Prompts) -> Tape:
        """A copy of a group's codes and scales, one tape for each request; of prompts in rows, one
        tape for all."""
        if self.side.layout == ROWS or isinstance(group, Prompts):
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
            return in_dtype(x if mean is None else x + mean, dtype)


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

    def floats(self, prompts: Prompts, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What the codes of prompts say: keys and values [1, H, tokens of all, dim]."""
        keys, values = self.k.read(prompts), self.v.read(prompts)
        return (
            self.k.decode(keys, self.mean, 0, prompts.total, dtype),
            self.v.decode(values, None, 0, prompts.total, dtype),
        )

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


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
