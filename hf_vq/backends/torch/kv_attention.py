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

from ... import dispatch
from ...dispatch import Implementation
from ...ops.kv import GROWING, KVCacheView, KVSide
from ...ops.reference import codes as reference
from ...ops.reference import kv_attention as attention_reference
from ...ops.rotary_mean import cos_sin, rotated_key_mean, turned_by
from .masks import band_rule, capturing, left_padding, remembered
from .partial_softmax import PLAIN, Maths, Part

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
        view: of the layer, whose keys have a rotated mean.
        mask: bool or additive [B or 1, Hq or 1, Q or 1, length]; None = causal from `visible` on.
        visible: position of the first token that is seen, without a mask.
        sinks_at: position of the first sink.
        softmax_scale: factor of the logits.
        softcap: c of c tanh(s / c); 0 = off.
    """

    maths: Maths
    query: Tensor
    view: KVCacheView
    mask: Tensor | None
    visible: int
    sinks_at: int
    softmax_scale: float
    softcap: float

    @property
    def sides(self) -> tuple[KVSide, KVSide]:
        """Keys and values."""
        return self.view.key, self.view.value

    @property
    def length(self) -> int:
        """Tokens of the layer."""
        return self.view.max_seqlen

    @property
    def first_query(self) -> int:
        """i0."""
        return self.length - self.query.shape[2]

    @property
    def band(self) -> tuple[int, int]:
        """a and b."""
        view = self.view
        end = min(view.num_coded, self.length - view.num_new)
        begin = max(self.first_query - view.window + 1, view.recent_start)
        return max(min(begin, end), self.visible), max(end, self.visible)

    @property
    def sinks(self) -> tuple[int, int]:
        """Positions that are floats for being sinks: those in front of b."""
        begin = max(self.sinks_at, self.visible)
        return begin, max(min(self.sinks_at + self.view.key.sinks.shape[2], self.band[1]), begin)

    def row(self, index: int, visible: int, sinks_at: int) -> Attention:
        """One row of the batch, with facts of its own."""
        row = slice(index, index + 1)
        mask = self.mask if self.mask is None or len(self.mask) == 1 else self.mask[row]
        key, value = (
            side._replace(
                codes=side.codes[row], scale=side.scale[row], sinks=side.sinks[row],
                recent=side.recent[row], mean=None if side.mean is None else side.mean[row],
                smoothing=None if side.smoothing is None else side.smoothing[row],
            )
            for side in self.sides
        )  # fmt: skip
        view = self.view._replace(key=key, value=value)
        if view.key_rotary_mean is not None:
            view = view._replace(key_rotary_mean=view.key_rotary_mean[row])
        return replace(
            self, query=self.query[row], view=view, mask=mask, visible=visible, sinks_at=sinks_at
        )

    def _decoded(self, side: KVSide, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        """Positions `begin` .. `end` of codes, with their means: [B, H, n, D], multiplied and
        rotated."""
        rows = self.maths.decode(side, begin, end, dtype)
        if side is not self.view.key or self.view.key_rotary_mean is None:
            return rows
        turning = multiplied(self._turning(begin, end), side)
        return (rows + self.maths.rotate(turning, side.parsed)).to(rows.dtype)

    def _turning(self, begin: int, end: int) -> Tensor:
        """R_n m of positions `begin` .. `end`, float32 [B, H, n, D]: turned to the first one, and
        from there on by angles that are the same for all pieces and layers."""
        view, count = self.view, end - begin
        inv_freq = view.rotary_inv_freq
        assert inv_freq is not None
        first = rotated_key_mean(view, torch.full((1,), begin, device=inv_freq.device))
        if capturing(inv_freq):  # what is made now exists once the graph has run
            cos, sin = _first_angles(inv_freq, count)
        else:
            cos, sin = remembered(inv_freq, _first_angles, dispatch.bucket(count))
        return turned_by(first, cos[:count], sin[:count], view.rotary_interleaved)

    def _divided(self, query: Tensor) -> Tensor:
        """Queries [B, Hq, Q, D] over keys that are multiplied."""
        smoothing = self.view.key.smoothing
        if smoothing is None:
            return query
        grouped = query.unflatten(1, (smoothing.shape[1], -1)) / smoothing[:, :, None]
        return grouped.flatten(1, 2).to(query.dtype)

    def _floats(self, side: KVSide, begin: int, end: int) -> Tensor:
        """Positions `begin` .. `end` of the floats."""
        start = self.view.recent_start
        return side.recent[:, :, begin - start : end - start]

    def finished(self, sink_logits: Tensor | None) -> Tensor:
        """The output [B, Hq, Q, Dv] of the dtype of the query.

        Args:
            sink_logits: [Hq] logits that attend to nothing.
        """
        blind = min(max(self.visible - self.first_query, 0), self.query.shape[2])
        shape = (*self.query.shape[:3], self.view.value.dim)
        if blind:  # left padding asks, and sees nothing
            out = self.query.new_zeros(shape)
            if blind < shape[2]:
                some = replace(self, query=self.query[:, :, blind:])
                out[:, :, blind:] = some.finished(sink_logits)
            return out
        coded, others = self._codes(), [*self._band(), self._newest()]
        return self.maths.merge(
            coded, others, sink_logits, self.view.value.parsed, self.query.dtype
        )

    def _newest(self) -> Part:
        """Tokens that ask."""
        begin, end = self.first_query, self.length
        keys, values = (self._floats(side, begin, end) for side in self.sides)
        mask = self._columns(begin, end)
        return self._attend(self.query, keys, values, mask, causal=mask is None)

    def _attend(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, **options: Any
    ) -> Part:
        return self.maths.attend(
            query, keys, values, self.softmax_scale,
            mask=mask, blind=self.mask is not None, softcap=self.softcap, **options,
        )  # fmt: skip

    def _columns(self, begin: int, end: int) -> Tensor | None:
        return None if self.mask is None else self.mask[..., begin:end]

    def _pieces(self) -> Iterator[tuple[int, int]]:
        """Positions of the first part, some at a time."""
        batch, heads, _, dim = self.view.key.recent.shape
        row = batch * heads * (dim + self.view.value.dim) * self.query.element_size()
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
        query = self.maths.rotate(self._divided(self.query), self.view.key.parsed)
        parts = []
        for piece in pieces:
            keys, values = (self._decoded(side, *piece, query.dtype) for side in self.sides)
            parts.append(self._attend(query, keys, values, self._columns(*piece)))
        return parts

    def _band(self) -> list[Part]:
        """Sinks, floats of a .. i0, codes of a .. b; none or one."""
        (begin, end), (sink, last), newest = self.band, self.sinks, self.first_query
        if begin == newest and sink == last:
            return []
        slots = slice(sink - self.sinks_at, last - self.sinks_at)
        sides = []
        for side in self.sides:
            parts = [side.sinks[:, :, slots], self._floats(side, begin, newest)]
            if begin < end:
                # What is rotated may be beyond float16 where the row itself is not.
                dtype = side.recent.dtype
                wide = torch.float32 if dtype == torch.float16 else dtype
                codes = self._decoded(side, begin, end, wide)
                codes = self.maths.rotate(codes, side.parsed, inverse=True)
                codes = codes if side.smoothing is None else codes / side.smoothing
                parts.append(reference.in_dtype(codes, dtype))
            sides.append(torch.cat(parts, 2))
        mask = None
        if self.mask is not None:
            columns = (sink, last), (begin, newest), (begin, end)
            mask = torch.cat([self.mask[..., one:other] for one, other in columns], -1)
        if begin < end:
            # What is made while a graph is captured exists once the graph has run.
            rule = (band_rule.__wrapped__ if capturing(self.query) else band_rule)(
                self.query.shape[2], self.view.window, newest - begin, end - begin, last - sink,
                max(sink - begin, 0), max(last - begin, 0), self.query.device,
            )  # fmt: skip
            if mask is None:
                mask = rule
            elif mask.dtype == torch.bool:
                mask = mask & rule
            else:
                mask = mask.masked_fill(~rule, -torch.inf)
        return [self._attend(self.query, sides[0], sides[1], mask)]


def multiplied(rows: Tensor, side: KVSide) -> Tensor:
    """Rows [B, H, n, D] times the factors of a side."""
    return rows if side.smoothing is None else rows * side.smoothing


def _first_angles(inv_freq: Tensor, count: int) -> tuple[Tensor, Tensor]:
    return cos_sin(inv_freq, torch.arange(count, device=inv_freq.device))


def attention(
    query: Tensor,
    view: KVCacheView,
    mask: Tensor | None,
    sink_logits: Tensor | None,
    softmax_scale: float,
    softcap: float,
    *,
    maths: Maths = PLAIN,
) -> Tensor:
    """Attention over a growing cache; arguments as in `ops.kv_ops`."""
    query = query.contiguous()
    queries, length, start = query.shape[2], view.max_seqlen, view.cache_leftpad
    if queries > view.num_new:  # no model asks for tokens of the past
        return attention_reference.attention(query, view, mask, sink_logits, softmax_scale, softcap)
    keys = view.key
    if keys.mean is not None:
        keys = keys._replace(mean=maths.rotate(multiplied(keys.mean, keys), keys.parsed))
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
    whole = Attention(maths, query, view._replace(key=keys), mask, *rows[0], softmax_scale, softcap)
    if len(set(rows)) == 1:
        return whole.finished(sink_logits)
    parts = [whole.row(index, *row).finished(sink_logits) for index, row in enumerate(rows)]
    return torch.cat(parts)


def supports(problem: dispatch.KVAttentionProblem) -> str | None:
    """Whether the cache grows: positions and lengths are numbers of the host."""
    if problem.memory != GROWING:
        return f"the cache is {problem.memory}, not growing"
    return None


ATTENTION = Implementation(attention, supports)
