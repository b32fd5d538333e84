"""What attention over parts of a coded cache is computed with: `Maths`, in plain PyTorch.

`torch_attention` says which parts there are, and needs nothing else of a device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...formats.scheme import VQScheme
from ...ops import rotate
from ...ops.kv import KVSide
from ...ops.layout import to_rows
from ...ops.reference import codes as reference

SCORES = 16 << 20  # float32 scores at a time

Part = tuple[Tensor, Tensor]
"""[B, Hq, Q, Dv] of any float dtype, zeros where nothing is seen, and the logarithm of the sum of
exp(logits) [B, Hq, Q] float32."""


def stored(side: KVSide, begin: int, end: int) -> tuple[Tensor, Tensor]:
    """Canonical codes [B, H, n, bytes] and scales of positions `begin` .. `end`."""
    at = side.first + begin
    codes = to_rows(side.codes, at, end - begin, side.parsed.entry_bits, side.layout)
    return codes, side.scale[:, :, at : at + end - begin]


class Maths:
    """What the parts are computed with; a device may have something faster."""

    def decode(self, side: KVSide, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        """Positions `begin` .. `end` of codes, with their mean: [B, H, n, D], rotated.

        Args:
            side: with a rotated mean.
            dtype: of the result, which may be more exact.
        """
        codes, scale = stored(side, begin, end)
        rows = reference.decode_rotated(codes, side.codebook, scale, side.parsed, side.dim)
        return rows if side.mean is None else rows + side.mean

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        softmax_scale: float,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        blind: bool = False,
        softcap: float = 0.0,
    ) -> Part:
        """Attention to some tokens, by plain products of float32, some queries at a time.

        Args:
            query: [B, Hq, Q, D].
            keys: [B, H, n, D].
            values: [B, H, n, Dv].
            softmax_scale: factor of the logits.
            mask: bool or additive, broadcastable to [B, Hq, Q, n]; None = all see all.
            causal: query t sees keys 0 .. t only.
            blind: whether the mask may hide all keys from a query.
            softcap: c of c tanh(s / c); 0 = off.
        """
        batch, heads, queries, _ = query.shape
        kv_heads, count = keys.shape[1:3]
        keys, values = keys.float().mT, values.float()
        out = query.new_empty(batch, heads, queries, values.shape[-1], dtype=torch.float32)
        lse = query.new_empty(batch, heads, queries, dtype=torch.float32)
        step = max(SCORES // (batch * heads * count), 1)
        for first in range(0, queries, step):
            some = slice(first, first + step)
            part = query[:, :, some].float()
            grouped = part.reshape(batch, kv_heads, -1, part.shape[-1])
            scores = (grouped @ keys).view(*part.shape[:3], count).mul_(softmax_scale)
            if softcap:
                scores.div_(softcap).tanh_().mul_(softcap)
            if causal:
                later = torch.ones(scores.shape[2:], dtype=torch.bool, device=query.device)
                scores.masked_fill_(later.triu(first + 1), -torch.inf)
            if mask is not None:
                seen = mask if mask.shape[2] == 1 else mask[:, :, some]
                if seen.dtype == torch.bool:
                    scores.masked_fill_(~seen, -torch.inf)
                else:
                    scores += seen
            lse[:, :, some] = total = scores.logsumexp(-1)
            weights = scores.sub_(_finite(total)[..., None]).exp_()
            grouped = weights.view(*grouped.shape[:3], count) @ values
            out[:, :, some] = grouped.view(*part.shape[:3], -1)
        return out, lse

    def rotate(self, x: Tensor, scheme: VQScheme, inverse: bool = False) -> Tensor:
        """`x` [.., D] as codes of `scheme` are, or back."""
        return x if scheme.rotation == "none" else rotate(x, None, scheme, inverse)

    def merge(
        self,
        coded: Sequence[Part],
        others: Sequence[Part],
        sink_logits: Tensor | None,
        scheme: VQScheme,
        dtype: torch.dtype,
    ) -> Tensor:
        """The output of all parts [B, Hq, Q, Dv].

        Args:
            coded: those whose output is rotated.
            others: those whose output is not.
            sink_logits: [Hq] logits that attend to nothing.
            scheme: of the values.
            dtype: of the output.
        """
        sums = [lse for _, lse in (*coded, *others)]
        if sink_logits is not None:
            sums.append(sink_logits.float()[:, None].expand_as(sums[0]))
        total = _finite(torch.stack(sums).logsumexp(0))

        def weighed(parts: Sequence[Part]) -> Tensor:
            (first, lse), *more = parts
            out = first.float() * (lse - total).exp_()[..., None]
            for part, lse in more:
                out.addcmul_(part, (lse - total).exp_()[..., None])
            return out

        out = weighed(others)
        if coded:
            out += self.rotate(weighed(coded), scheme, inverse=True)
        return reference.in_dtype(out, dtype)


def _finite(lse: Tensor) -> Tensor:
    """So that exp(-inf - lse) is 0 where nothing is seen."""
    return lse.clamp_min(torch.finfo(torch.float32).min)


PLAIN = Maths()
