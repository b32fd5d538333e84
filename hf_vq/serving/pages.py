"""Pages: the codes of a fixed number of tokens each, which the requests of a server share.

One layer's page of T tokens, H key/value heads; every part begins at a multiple of 16 bytes:

    [ keys: codes | scales ][ values: codes | scales ]

    codes    uint8 [H, T, bytes]         in rows, or [H, T / 256, bytes] in blocks (`ops.layout`)
    scales   fp16 [H, T, numbers]        no number, one, or a scale and a zero for each row

Pages hold codes only, no sinks and no window: every query reads every token as codes, its own
too, and the layer's mean of the keys is known before the first request. So a token's codes depend
on the token alone, and what a request gets does not depend on how its prompt was cut, who shares
its pages, who came before it, or whether it was evicted. A rotary mean of the keys (`ops.
rotary_mean`) turns with the token's position in its request.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..cache.key_means import Calibrated, Rotary, smoothable
from ..formats.catalog import KVScheme
from ..formats.packing import packed_size
from ..formats.scheme import VQScheme
from ..ops import KVCacheView, KVSide, decode_kv, kv_append
from ..ops.kv_ops import through_tables
from ..ops.layout import BLOCK, ROWS, block_bytes, layouts_for, to_rows
from ..ops.library import without_autocast
from ..ops.reference.codes import in_dtype
from ..ops.rotary_mean import rotated
from .batch import Batch, Group, Prompts, Slots, Table

ALIGNMENT = 16  # bytes: of the widest load


CodesAndScales = tuple[Tensor, Tensor]
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
        tables: whether kernels read and write pages where they are (`ops.kv`); else codes are
            copied side by side before they are read.
    """

    keys: PageSide
    values: PageSide
    tables: bool

    @classmethod
    def of(
        cls, scheme: KVScheme, heads: int, dim: int, tokens: int, like: Tensor, turns: bool = False
    ) -> PageFormat:
        """The format whose layouts the kernels for `like` (device and dtype of the queries) want;
        rows, where a page is not made of whole blocks.

        Args:
            turns: keys have a rotary mean.
        """
        layouts = layouts_for(scheme.key, scheme.value, dim, dim, like)
        if tokens % BLOCK or ROWS in layouts:
            layouts = ROWS, ROWS
        keys = PageSide(scheme.key, layouts[0], heads, dim, tokens)
        values = PageSide(scheme.value, layouts[1], heads, dim, tokens)
        rows = layouts == (ROWS, ROWS)
        tables = rows and through_tables(scheme.key, scheme.value, dim, tokens, like, turns)
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

    def empty(self, tokens: int) -> CodesAndScales:
        """A buffer for the codes of tokens, in rows."""
        return (
            self.codes.new_empty(1, self.side.heads, tokens, self.codes.shape[3]),
            self.scale.new_empty(1, self.side.heads, tokens, self.scale.shape[3]),
        )

    def read(self, group: Group | Prompts) -> CodesAndScales:
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
        self,
        tape: CodesAndScales,
        mean: Tensor | None,
        smoothing: Tensor | None,
        first: int,
        count: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """`count` tokens from `first` on of tapes that were read: [requests, H, count, dim]."""
        scheme = self.side.scheme
        rows = to_rows(tape[0], first, count, scheme.entry_bits, self.side.layout)
        with without_autocast(rows.device):
            scale = tape[1][:, :, first : first + count]
            x = decode_kv(rows, scale, self.codebook, scheme, self.side.dim)
            x = x if smoothing is None else x / smoothing
            return in_dtype(x if mean is None else x + mean, dtype)


class LayerPages:
    """One layer in all pages.

    Args:
        memory: uint8 [pages, bytes of a page of this layer]; may be a view.
        page: what lies there.
        codebooks: of the keys and of the values.
        known: means of the keys and what they are multiplied by; None = nothing.
        rotary: how keys turn, where they have a rotary mean.
    """

    def __init__(
        self,
        memory: Tensor,
        page: PageFormat,
        codebooks: tuple[Tensor, Tensor],
        known: Calibrated | None = None,
        rotary: Rotary | None = None,
    ) -> None:
        keys, values = memory.split([sum(page.keys.parts), sum(page.values.parts)], 1)
        self.k = Pages(keys, page.keys, codebooks[0])
        self.v = Pages(values, page.values, codebooks[1])
        found = (None,) * 3 if known is None else (known.mean, known.rotary_mean, known.smoothing)
        self.mean, self.rotary_mean, smoothing = (
            None if each is None else each.to(memory.device, torch.float32)[None, :, None]
            for each in found
        )
        self.smoothing = smoothing if smoothable(page.keys.scheme) else None
        self.rotary = rotary
        self._views: dict[torch.dtype, KVCacheView] = {}

    @property
    def turns(self) -> bool:
        """Whether keys have a rotary mean."""
        return self.rotary_mean is not None and self.rotary is not None

    def _turning(self, positions: Tensor) -> Tensor | None:
        """R_n m of positions int64 [n] or [requests, n]: [1 or requests, H, n, dim]; None = 0."""
        if self.rotary_mean is None or self.rotary is None:
            return None
        interleaved = bool(self.rotary.interleaved)
        return rotated(self.rotary_mean, self.rotary.inv_freq, interleaved, positions)

    def _standing(self, keys: Tensor, positions: Tensor | None) -> Tensor:
        """Keys [1, H, n, dim] less their rotary mean; those behind `positions` are nobody's."""
        turning = None if positions is None else self._turning(positions)
        if turning is None or positions is None:
            return keys
        return keys.float() - pad(turning, (0, 0, 0, keys.shape[2] - len(positions)))

    def put(
        self, keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor | None = None
    ) -> None:
        """Encode keys and values [1, H, n, dim] where they belong, by kernels: as `write`, of pages
        with tables.

        Args:
            slots: of the tokens (`ops.kv_append`).
            positions: of the tokens in their requests, int64 [n]; for keys with a rotary mean.
        """
        kv_append(self._standing(keys, positions), values, self._pages(keys), slots)

    def through(self, table: Table, like: Tensor) -> KVCacheView:
        """What attention reads of requests with one new token each, where it is.

        Args:
            like: a query, decides the dtype.
        """
        view = self._pages(like)._replace(
            cache_seqlens=table.length, page_table=table.pages, max_seqlen=table.longest
        )
        return self._turned(view, self.rotary_mean)

    def _turned(self, view: KVCacheView, rotary_mean: Tensor | None) -> KVCacheView:
        """The view with a rotary mean, which attention adds."""
        if rotary_mean is None or self.rotary is None:
            return view
        return view._replace(
            key_rotary_mean=rotary_mean, rotary_inv_freq=self.rotary.inv_freq,
            rotary_interleaved=bool(self.rotary.interleaved),
        )  # fmt: skip

    def _pages(self, like: Tensor) -> KVCacheView:
        """All pages, without a table; made once, as they do not move."""
        if like.dtype not in self._views:
            none = like.new_empty(1, self.k.side.heads, 0, self.k.side.dim)
            keys, values = ((pages.codes, pages.scale) for pages in (self.k, self.v))
            self._views[like.dtype] = self._view(keys, values, (none, none))
        return self._views[like.dtype]

    def _view(
        self,
        keys: CodesAndScales,
        values: CodesAndScales,
        recent: tuple[Tensor, Tensor],
        first: int = 0,
    ) -> KVCacheView:
        """Codes and scales of pages, or copied out of them, of as many tokens as there are floats
        in `recent`."""
        key, value = (
            KVSide(codes, scale, pages.codebook, mean, floats[:, :, :0], floats, first, pages.spec,
                   pages.side.layout, smoothing)
            for pages, (codes, scale), (mean, smoothing), floats in zip(
                (self.k, self.v), (keys, values), ((self.mean, self.smoothing), (None, None)),
                recent, strict=True,
            )
        )  # fmt: skip
        tokens = recent[0].shape[2]
        return KVCacheView(key, value, None, None, None, None, tokens, 0, 0, tokens)

    def write(self, keys: Tensor, values: Tensor, batch: Batch | Slots) -> None:
        """Encode the new tokens of a batch: keys and values [1, H, new tokens, dim]."""
        k, v = self.k, self.v
        keys = self._standing(keys, batch.positions if self.turns else None)
        if k.side.layout != ROWS:
            for rows, number, at in batch.spans:
                some = keys[:, :, rows], values[:, :, rows]
                page_k = k.codes[number][None], k.scale[number][None]
                page_v = v.codes[number][None], v.scale[number][None]
                kv_append(*some, self._view(page_k, page_v, some, first=at))
            return
        buffers = k.empty(keys.shape[2]), v.empty(keys.shape[2])
        kv_append(keys, values, self._view(*buffers, (keys, values)))
        page, place = batch.places
        for pages, (codes, scale) in zip((k, v), buffers, strict=True):
            pages.codes[page, :, place] = codes[0].transpose(0, 1)
            pages.scale[page, :, place] = scale[0].transpose(0, 1)

    def floats(self, prompts: Prompts, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What the codes of prompts say: keys and values [1, H, tokens of all, dim]."""
        keys, values = self.k.read(prompts), self.v.read(prompts)
        return (
            self._keys(keys, lambda: prompts.positions, 0, prompts.total, dtype),
            self.v.decode(values, None, None, 0, prompts.total, dtype),
        )

    def _keys(
        self,
        tape: CodesAndScales,
        positions: Callable[[], Tensor],
        first: int,
        count: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """Keys as `Pages.decode` gives them; positions, as of `_turning`, are made only for keys
        that turn."""
        turning = self._turning(positions()) if self.turns else None
        mean = self.mean if turning is None or self.mean is None else self.mean + turning
        return self.k.decode(tape, mean, self.smoothing, first, count, dtype)

    def groups(self, batch: Batch) -> list[Group]:
        """The requests that are read at once: codes in blocks cannot be aligned with each other."""
        rows = self.k.side.layout == self.v.side.layout == ROWS
        return batch.together if rows else batch.alone

    def read(self, group: Group, like: Tensor) -> KVCacheView:
        """What attention reads of a group. The new tokens are floats, but what their codes say; one
        new token that a kernel of blocks will read is left to it.

        Args:
            like: a query, decides the dtype.
        """
        keys, values = self.k.read(group), self.v.read(group)
        first, new = group.past, group.new
        blocks = self.k.side.layout != ROWS and self.v.side.layout != ROWS
        if new == 1 and group.past and blocks:  # a prompt of one token attends to its floats
            first, new = group.length, 0

        def positions() -> Tensor:
            found = torch.arange(first, first + new, device=like.device)
            return found if group.shift is None else found - group.shift[:, None]

        recent = (
            self._keys(keys, positions, first, new, like.dtype),
            self.v.decode(values, None, None, first, new, like.dtype),
        )
        view, rows = self._view(keys, values, recent), len(recent[0])
        if self.mean is not None:
            mean, smoothing = (
                None if each is None else each.expand(rows, -1, -1, -1)
                for each in (self.mean, self.smoothing)
            )
            view = view._replace(key=view.key._replace(mean=mean, smoothing=smoothing))
        if self.rotary_mean is not None:
            nowhere = torch.zeros(1, dtype=torch.int64, device=like.device)
            begins = nowhere if group.shift is None else -group.shift[:, None]
            turning = self._turning(begins)
            assert turning is not None
            view = self._turned(view, turning.expand(rows, -1, -1, -1))
        return view._replace(max_seqlen=first + new, num_new=new, num_coded=first)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
