"""What `cpu.vq_attention` computes, in float64: every rounding that is its design, and no other.

    queries     rounded to 8 bits, step max |q| / 127 (universal keys)
    levels      a codebook's entries rounded to 8 bits, step max |entry| / 127
    tables      <q, entry> per sub-quantizer in 8 bits above its minimum, with one step for all
                within a factor of two of the widest, of half of it, .. (learned keys)
    weights     softmax weight times the value's scale in 2 * `bits` bits, one step per block of 256

Each result comes with a tolerance: what float32 may be wrong by on the way.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_vq.formats.packing import unpack_bits
from hf_vq.formats.scheme import VQScheme
from hf_vq.ops import KVCacheView
from hf_vq.ops.layout import BLOCK, to_rows
from hf_vq.transforms import rotate

ROUNDING = 2.0**-24  # of float32, relative
FUNCTIONS = 1e-6  # of exp and tanh, and of a sum of weights; relative


class Bounded(NamedTuple):
    """A number and how far float32 may be from it."""

    value: Tensor
    slack: Tensor


def rounded(codebook: Tensor) -> Tensor:
    """Entries [entries, x] float64 in steps of max |entry| / 127, as float32 rounds them."""
    entries = codebook.float()
    top, steps = entries.abs().max(), torch.tensor(127.0)  # number / tensor is rounded twice
    return (entries * (steps / top)).round().double() * (top / steps).double()


def codes_of(cached: KVCacheView, side: str) -> Tensor:
    """int64 [B, H, coded, S]."""
    key = side == "k"
    scheme = VQScheme.parse(cached.key.scheme if key else cached.value.scheme)
    data, first = (
        (cached.key.codes, cached.key.first) if key else (cached.value.codes, cached.value.first)
    )
    layout = cached.key.layout if key else cached.value.layout
    dim = (cached.key.recent if key else cached.value.recent).shape[3]
    rows = to_rows(data, first, cached.num_coded, scheme.entry_bits, layout)
    return unpack_bits(rows, scheme.entry_bits, dim // scheme.vector_size).long()


def universal_dots(query: Tensor, scheme: VQScheme, codebook: Tensor, codes: Tensor) -> Bounded:
    """<query, key> [coded], not scaled, of a query [D] and codes [coded, S]."""
    turned = rotate(query[None].double(), scheme)[0]
    step = turned.abs().max() / 127
    units = turned / step
    levels = rounded(codebook[0])
    dots = (levels[codes].flatten(-2) @ units.round()) * step
    # A number in the middle between two integers may go either way.
    doubt = 16 * ROUNDING * query.double().norm() / step
    undecided = ((units - units.floor() - 0.5).abs() < doubt).sum()
    return Bounded(dots, undecided * step * levels.abs().max() + 4 * ROUNDING * dots.abs())


def table_dots(query: Tensor, codebook: Tensor, codes: Tensor) -> Bounded:
    """The same for learned codebooks [S, entries, x]."""
    parts = query.double().unflatten(-1, (codebook.shape[0], -1))
    products = parts[:, None] * codebook.double()
    table = products.sum(-1)
    low = table.amin(1, keepdim=True)
    span = (table.amax(1, keepdim=True) - low)[:, 0]
    group = (-torch.log2(span / span.max())).floor().clamp(0, 3)
    step = torch.stack([span[group == g].max() for g in group])[:, None] / 255
    units = (table - low) / step
    values = low + units.round() * step
    doubt = ROUNDING * (8 * products.abs().sum(-1).amax(1, keepdim=True) / step + 4 * 255)
    undecided = (((units - units.floor() - 0.5).abs() < doubt) * step).amax(1).sum()
    picked = values.gather(1, codes.T).T
    return Bounded(picked.sum(-1), undecided + 16 * ROUNDING * picked.abs().sum(-1))


def float_dots(query: Tensor, keys: Tensor) -> Bounded:
    """<query, key> of floats [n, D]: the errors of D additions add up like a random walk."""
    products = keys.double() * query.double()
    walk = 4 * ROUNDING * query.shape[0] ** 0.5
    return Bounded(products.sum(-1), walk * products.abs().sum(-1))


def weighted_codes(
    weights: Tensor, wrong: Tensor, first: int, levels: Tensor, bits: int
) -> Bounded:
    """sum_t w_t levels_t [Dv] of weights [coded] in 2 * `bits` bits, one step per block.

    Args:
        wrong: what the weights may be wrong by, relative.
    """
    steps = 4**bits - 1
    pad = (first % BLOCK, -(first + len(weights)) % BLOCK)
    blocks = torch.nn.functional.pad(weights, pad).unflatten(0, (-1, BLOCK))
    total, slack = torch.zeros(levels.shape[1]).double(), torch.zeros(levels.shape[1]).double()
    for sign in (1, -1):
        part = (sign * blocks).clamp_min(0)
        step = part.amax(1, keepdim=True) / steps
        units = torch.where(step > 0, part / step, 0)
        undecided = (units - units.floor() - 0.5).abs() < units * wrong + 1e-9
        cut = slice(pad[0], pad[0] + len(weights))
        total += sign * (units.round() * step).flatten()[cut] @ levels
        slack += (undecided * step).flatten()[cut] @ levels.abs()
    return Bounded(total, slack)


def attend(
    query: Tensor,
    cached: KVCacheView,
    bits: int,
    *,
    softmax_scale: float,
    mask: Tensor | None = None,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
) -> Bounded:
    """Attention [B, Hq, Q, Dv] float64 over codes in blocks; arguments as `ops.kv_attention`.

    Args:
        bits: half the bits of a weight.
    """
    batch, heads, queries, _ = query.shape
    dim = cached.value.recent.shape[3]
    out = torch.zeros(batch, heads, queries, dim, dtype=torch.float64)
    slack = torch.zeros_like(out)
    codes = codes_of(cached, "k"), codes_of(cached, "v")
    if mask is not None:
        mask = mask.expand(batch, heads, queries, mask.shape[-1])
    for b in range(batch):
        for h in range(heads):
            for t in range(queries):
                seen = None if mask is None else mask[b, h, t, : cached.max_seqlen]
                sink = None if sink_logits is None else sink_logits[h].double()
                i = cached.max_seqlen - queries + t
                head = h // (heads // cached.key.recent.shape[1])
                logits, coded = _logits(
                    query[b, h, t], cached, codes[0][b, head], b, head, i, softmax_scale
                )
                value, error = _finish(logits, seen, i, softcap)
                result = _values(
                    value, error, coded, sink, cached, codes[1][b, head], b, head, bits
                )
                out[b, h, t], slack[b, h, t] = result
    return Bounded(out, slack)


def _logits(
    query: Tensor, cached: KVCacheView, codes: Tensor, b: int, head: int, i: int, scaling: float
) -> tuple[Bounded, Tensor]:
    """Logits of all positions, and which of them come from codes."""
    scheme, length = VQScheme.parse(cached.key.scheme), cached.max_seqlen
    near = max(cached.recent_start, min(i - cached.window + 1, length - cached.num_new))
    near = min(near, cached.num_coded)
    value, slack = (torch.zeros(length, dtype=torch.float64) for _ in range(2))
    if scheme.has_scale:
        dots = universal_dots(query, scheme, cached.key.codebook, codes[:near])
        scale = cached.key.scale[b, head, cached.key.first :][:near, 0].double()
        dots = Bounded(dots.value * scale, dots.slack * scale.abs())
    else:
        dots = table_dots(query, cached.key.codebook[head], codes[:near])
    value[:near], slack[:near] = dots
    if cached.key.mean is not None:
        shift = float_dots(query, cached.key.mean[b, head])
        value[:near] += shift.value
        slack[:near] += shift.slack
    tail = float_dots(query, cached.key.recent[b, head, near - cached.recent_start :])
    value[near:], slack[near:] = tail
    coded = torch.arange(length) < near
    start = 0 if cached.cache_leftpad is None else int(cached.cache_leftpad[b])
    for slot in range(cached.key.sinks.shape[2]):
        j = start + slot
        if 0 <= j < near:
            sink = float_dots(query, cached.key.sinks[b, head, slot : slot + 1])
            value[j], slack[j], coded[j] = sink.value[0], sink.slack[0], False
    return Bounded(value * scaling, slack * abs(scaling) + 4 * ROUNDING * value.abs()), coded


def _finish(logits: Bounded, seen: Tensor | None, i: int, softcap: float) -> Bounded:
    value, slack = logits
    if softcap:
        value = softcap * torch.tanh(value / softcap)
        slack = slack + 2 * FUNCTIONS * softcap
    if seen is None:
        value = value.masked_fill(torch.arange(len(value)) > i, -torch.inf)
    elif seen.dtype == torch.bool:
        value = value.masked_fill(~seen, -torch.inf)
    else:
        value = value + seen.double()
        slack = slack + ROUNDING * value.abs()
    return Bounded(value, slack)


def _values(
    value: Tensor, slack: Tensor, coded: Tensor, sink: Tensor | None, cached: KVCacheView,
    codes: Tensor, b: int, head: int, bits: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    scheme, dim = VQScheme.parse(cached.value.scheme), cached.value.recent.shape[3]
    top = value.max()
    if top == -torch.inf:
        return torch.zeros(dim, dtype=torch.float64), torch.zeros(dim, dtype=torch.float64)
    top = top if sink is None else torch.maximum(top, sink)
    p = (value - top).exp()
    total = p.sum() + (0 if sink is None else (sink - top).exp())

    codebook, count = cached.value.codebook, cached.num_coded
    if scheme.has_scale:
        levels = rounded(codebook[0])[codes].flatten(-2)
        scale = cached.value.scale[b, head, cached.value.first :][:count, 0].double()
    else:
        books = torch.stack([rounded(book) for book in codebook[head]])
        levels = books[torch.arange(codes.shape[1]), codes].flatten(-2)
        scale = torch.ones(count, dtype=torch.float64)
    weights = torch.where(coded, p, 0)[:count] * scale
    # Wrong logits change the weights; sums are rounded before they are rotated back.
    wrong = 2 * (2 * slack[value > -torch.inf].max().clamp(max=1) + FUNCTIONS)
    sums, undecided = weighted_codes(weights, wrong, cached.value.first, levels, bits)
    size = weights.abs() @ levels.abs()
    turned = rotate(sums[None], scheme)[0]
    out = turned.clone()

    floats = torch.where(coded, 0, p)
    start = 0 if cached.cache_leftpad is None else int(cached.cache_leftpad[b])
    rows = torch.zeros(len(p), dim, dtype=torch.float64)
    rows[cached.recent_start :] = cached.value.recent[b, head].double()
    for slot in range(cached.value.sinks.shape[2]):
        j = start + slot
        if (
            0 <= j < len(p)
            and not coded[j]
            and j < cached.recent_start + cached.value.recent.shape[2]
        ):
            rows[j] = cached.value.sinks[b, head, slot].double()
    out += floats @ rows

    error = wrong * (size.norm() + floats @ rows.abs()) + undecided.norm() + FUNCTIONS * size.norm()
    return out / total, error / total
