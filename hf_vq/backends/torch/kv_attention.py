"""Attention of any number of queries over a coded cache, a bounded number of tokens at a time.

Queries at positions i0 .. length - 1. Tokens in front of a are codes to all of them, those from b
on floats; in between, the window of a query decides (its size w):

position   0            a                b              i0              length
           | codes      | codes  j <= i - w             |               |
           | sinks      | floats j > i - w | floats     | floats        |
part       every query    band: rule of the window        j <= i

Each part gives its own softmax and the logarithm of its sum, by which parts are weighed:

    lse = log sum_parts exp(lse_part)        o = sum_parts exp(lse_part - lse) o_part

Codes in front of a are looked up but not rotated back: <q, m + R^-1 k> = <R q, R m + k>, so that
the query is rotated instead, and the outputs of these parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...dispatch import Implementation
from ...formats.scheme import VQScheme
from ...ops.reference import codes as reference
from ...ops.reference import kv_attention as attention_reference
from .masks import band_rule, capturing, left_padding, remembered
from .partial_softmax import PLAIN, Maths, Part, Side

DECODED_BYTES = 128 << 20  # of keys and values at a time
WHOLE_TOKENS = 1024  # decoded at a time, or a multiple, but for the last: kernels like few sizes
_FEWEST_TOKENS = 128
MOST_PIECES = 8  # of the tokens, however many they are: each has an output to keep


@dataclass(frozen=True)
class Attention:
    """Attention of one call, or of one row of its batch.

    Args:
        maths: computes the parts.
        query: [B, Hq, Q, D]; the last is that of the last token.
        keys: of the layer.
        values: of the layer.
        mask: bool or additive [B or 1, Hq or 1, Q or 1, length]; None = causal from `visible` on.
        visible: position of the first token that is seen, without a mask.
        sinks_at: position of the first sink.
        window: w.
        fresh: tokens of the newest update, at least Q.
        coded: tokens that have codes.
        scaling: factor of the logits.
        softcap: c of c tanh(s / c); 0 = off.
    """

    maths: Maths
    query: Tensor
    keys: Side
    values: Side
    mask: Tensor | None
    visible: int
    sinks_at: int
    window: int
    fresh: int
    coded: int
    scaling: float
    softcap: float

    @property
    def length(self) -> int:
        """Tokens of the layer."""
        return self.keys.tail_start + self.keys.tail.shape[2]

    @property
    def first_query(self) -> int:
        """i0."""
        return self.length - self.query.shape[2]

    @property
    def band(self) -> tuple[int, int]:
        """a and b."""
        end = min(self.coded, self.length - self.fresh)
        begin = max(self.first_query - self.window + 1, self.keys.tail_start)
        return max(min(begin, end), self.visible), max(end, self.visible)

    @property
    def sinks(self) -> tuple[int, int]:
        """Positions that are floats for being sinks: those in front of b."""
        begin = max(self.sinks_at, self.visible)
        return begin, max(min(self.sinks_at + self.keys.sinks.shape[2], self.band[1]), begin)

    def row(self, index: int, visible: int, sinks_at: int) -> Attention:
        """One row of the batch, with facts of its own."""
        row = slice(index, index + 1)
        mask = self.mask if self.mask is None or len(self.mask) == 1 else self.mask[row]
        return replace(
            self, query=self.query[row], keys=self.keys.row(index), values=self.values.row(index),
            mask=mask, visible=visible, sinks_at=sinks_at,
        )  # fmt: skip

    def finished(self, s_aux: Tensor | None) -> Tensor:
        """The output [B, Hq, Q, Dv] of the dtype of the query.

        Args:
            s_aux: [Hq] logits that attend to nothing.
        """
        blind = min(max(self.visible - self.first_query, 0), self.query.shape[2])
        shape = (*self.query.shape[:3], self.values.tail.shape[-1])
        if blind:  # left padding asks, and sees nothing
            out = self.query.new_zeros(shape)
            if blind < shape[2]:
                some = replace(self, query=self.query[:, :, blind:])
                out[:, :, blind:] = some.finished(s_aux)
            return out
        coded, others = self._codes(), [*self._band(), self._newest()]
        return self.maths.merge(coded, others, s_aux, self.values.scheme, self.query.dtype)

    def _newest(self) -> Part:
        """Tokens that ask."""
        begin, end = self.first_query, self.length
        keys, values = (side.floats(begin, end) for side in (self.keys, self.values))
        mask = self._columns(begin, end)
        return self._attend(self.query, keys, values, mask, causal=mask is None)

    def _attend(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, **options: Any
    ) -> Part:
        return self.maths.attend(
            query, keys, values, self.scaling,
            mask=mask, blind=self.mask is not None, softcap=self.softcap, **options,
        )  # fmt: skip

    def _columns(self, begin: int, end: int) -> Tensor | None:
        return None if self.mask is None else self.mask[..., begin:end]

    def _pieces(self) -> Iterator[tuple[int, int]]:
        """Positions of the first part, some at a time."""
        batch, heads, _, dim = self.keys.tail.shape
        row = batch * heads * (dim + self.values.tail.shape[-1]) * self.query.element_size()
        most = max(DECODED_BYTES // row, self.length // MOST_PIECES)
        whole = WHOLE_TOKENS if most >= WHOLE_TOKENS else _FEWEST_TOKENS
        most = max(most // whole, 1) * whole
        begin, (first_sink, last_sink) = self.band[0], self.sinks
        for start, end in (self.visible, min(first_sink, begin)), (last_sink, begin):
            even = start + (max(end - start, 0) // whole) * whole
            for first, last in (start, even), (even, end):
                for at in range(first, last, most):
                    yield at, min(at + most, last)

    def _codes(self) -> list[Part]:
        """Codes in front of a."""
        pieces = list(self._pieces())
        if not pieces:
            return []
        query = self.maths.rotate(self.query, self.keys.scheme)
        parts = []
        for piece in pieces:
            keys, values = (
                self.maths.decode(side, *piece, query.dtype) for side in (self.keys, self.values)
            )
            parts.append(self._attend(query, keys, values, self._columns(*piece)))
        return parts

    def _band(self) -> list[Part]:
        """Sinks, floats of a .. i0, codes of a .. b; none or one."""
        (begin, end), (sink, last), newest = self.band, self.sinks, self.first_query
        if begin == newest and sink == last:
            return []
        slots = slice(sink - self.sinks_at, last - self.sinks_at)
        sides = []
        for side in (self.keys, self.values):
            parts = [side.sinks[:, :, slots], side.floats(begin, newest)]
            if begin < end:
                # What is rotated may be beyond float16 where the row itself is not.
                half = side.tail.dtype == torch.float16
                wide = torch.float32 if half else side.tail.dtype
                codes = self.maths.decode(side, begin, end, wide)
                codes = self.maths.rotate(codes, side.scheme, inverse=True)
                parts.append(reference.in_dtype(codes, side.tail.dtype))
            sides.append(torch.cat(parts, 2))
        mask = None
        if self.mask is not None:
            columns = (sink, last), (begin, newest), (begin, end)
            mask = torch.cat([self.mask[..., one:other] for one, other in columns], -1)
        if begin < end:
            # What is made while a graph is captured exists once the graph has run.
            rule = (band_rule.__wrapped__ if capturing(self.query) else band_rule)(
                self.query.shape[2], self.window, newest - begin, end - begin, last - sink,
                max(sink - begin, 0), max(last - begin, 0), self.query.device,
            )  # fmt: skip
            if mask is None:
                mask = rule
            elif mask.dtype == torch.bool:
                mask = mask & rule
            else:
                mask = mask.masked_fill(~rule, -torch.inf)
        return [self._attend(self.query, sides[0], sides[1], mask)]


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
    *,
    maths: Maths = PLAIN,
) -> Tensor:
    """Attention over a coded cache; shapes and meaning in `ops.attention.CachedKV`."""
    query = query.contiguous()
    queries, length = query.shape[2], tail_start + tail_k.shape[2]
    if queries > fresh:  # no model asks for tokens of the past
        return attention_reference.attention(
            query, sink_k, sink_v, k_codes, k_scale, k_mean, v_codes, v_scale, tail_k, tail_v,
            codebook_k, codebook_v, start, mask, s_aux, tail_start, window, fresh, coded, k_first,
            v_first, scaling, softcap, key_scheme, value_scheme, key_layout, value_layout,
        )  # fmt: skip
    mean = None if k_mean is None else maths.rotate(k_mean, key_scheme)
    keys = Side(
        k_codes, k_scale, codebook_k, mean, sink_k, tail_k, k_first, tail_start, key_scheme,
        key_layout,
    )  # fmt: skip
    values = Side(
        v_codes, v_scale, codebook_v, None, sink_v, tail_v, v_first, tail_start, value_scheme,
        value_layout,
    )  # fmt: skip
    padding: list[int] | None = [0]
    if mask is not None:
        padding = None  # a graph that is being captured cannot be waited for
        if not capturing(mask):
            padding = remembered(mask, left_padding, queries, length)
        mask = mask[..., :length] if padding is None else None
    sinks_at: list[int] = [0] if start is None else remembered(start, Tensor.tolist)
    rows = [
        (padding[index % len(padding)] if padding else 0, sinks_at[index % len(sinks_at)])
        for index in range(len(query))
    ]
    whole = Attention(
        maths, query, keys, values, mask, *rows[0],
        window, fresh, coded, scaling, softcap,
    )  # fmt: skip
    if len(set(rows)) == 1:
        return whole.finished(s_aux)
    return torch.cat([whole.row(index, *row).finished(s_aux) for index, row in enumerate(rows)])


ATTENTION = Implementation(attention)
