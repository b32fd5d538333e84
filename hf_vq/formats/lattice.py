"""E8P, the 8-dimensional 16-bit lattice codebook of QuIP# (arXiv 2402.04396, section 4).

The entries are the half-integer vectors of even coordinate sum (the coset D8 + 1/2) nearest to the
origin, moved by +1/4 or -1/4 in every coordinate, times a scale that suits N(0, 1) data. Up to
signs there are 256 of them, so 4 KB stand for 65536 entries of 16 bytes. The code of an entry:

    bits 0-7    row of the pattern |s|, s in {1/2, 3/2, 5/2}^8
    bits 8-14   1 where coordinate 0..6 of s is negative; the sign of coordinate 7 is the one that
                makes the sum of s even
    bit 15      1 where the shift is -1/4

The stored tensor [257, 8] holds the scaled patterns, then a row of the scaled shift. Its rows:
the 227 patterns of squared norm <= 10, which are all there are, by norm and then lexicographic, and
29 of squared norm 12: those with three 1/2 at positions of even sum, and 1/2 at positions 0, 1, 2.
"""

from __future__ import annotations

import itertools
from functools import cache

import torch

from ..errors import VQFormatError
from .universal import universal_tensor

_CHUNK = 1 << 15  # vectors per step: about 40 MB of work space, 200 MB if all are outliers
_FIVE = 37  # a pattern that ends in 5/2
_EXTRA = 227  # first pattern of squared norm 12
# Batcher's odd-even merge sort of eight
_SORT = (
    ((0, 1), (2, 3), (4, 5), (6, 7)),
    ((0, 2), (1, 3), (4, 6), (5, 7)),
    ((1, 2), (5, 6)),
    ((0, 4), (1, 5), (2, 6), (3, 7)),
    ((2, 4), (3, 5)),
    ((1, 2), (3, 4), (5, 6)),
)


@cache
def e8p_patterns() -> torch.Tensor:
    """The 256 unscaled patterns in the order of their codes: float32 [256, 8], CPU."""
    shells: dict[float, list[tuple[float, ...]]] = {}
    for pattern in itertools.product((0.5, 1.5, 2.5), repeat=8):
        shells.setdefault(sum(v * v for v in pattern), []).append(pattern)
    extra = []
    for halves in itertools.combinations(range(8), 3):
        if sum(halves) % 2 == 0 or halves == (0, 1, 2):
            extra.append(tuple(0.5 if i in halves else 1.5 for i in range(8)))
    rows = [p for norm in (2.0, 4.0, 6.0, 8.0, 10.0) for p in sorted(shells[norm])]
    return torch.tensor(rows + sorted(extra))


def e8p_codebook() -> torch.Tensor:
    """The codebook that a checkpoint stores: float16 [257, 8], CPU, in units of N(0, 1) data.

    The scale is a dyadic number of few digits: float16 holds all 65536 entries exactly.
    """
    shift = universal_tensor("e8p_shift")
    return torch.cat([universal_tensor("e8p_patterns"), shift.expand(1, 8)])


def e8p_decode(codes: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    """Entries float32 [..., 8] of the integer codes [...], of which the low 16 bits count.

    `codebook` is float [257, 8], any scale.
    """
    codes = codes.long()
    patterns, shift = codebook[:256].float(), codebook[256].float()
    odd = (patterns.sum(1) / (4 * shift[0])).round().long() & 1
    row = codes & 255
    negative = (codes[..., None] >> torch.arange(8, 16, device=codes.device)) & 1
    sign_7 = (negative[..., :7].sum(-1) + odd[row]) & 1
    minus = 1 - 2 * torch.cat([negative[..., :7], sign_7[..., None]], dim=-1)
    return patterns[row] * minus + shift * (1 - 2 * negative[..., 7:])


def e8p_encode(x: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    """Code int64 [n] of the entry nearest to each row of `x` [n, 8].

    Exact up to float64 rounding, ties decided the same on every device. `codebook` is float
    [257, 8], e8p_codebook() at any scale, rounded or not; VQFormatError for other patterns.

    Rearrangement inequality: within a complete shell the best pattern has its largest values where
    |y| = |x -/+ shift| is largest, and if its parity asks for one more sign flip, the flip is at
    the smallest |y|. So sorted |y| gives the best of the first 227 patterns; the others are
    looked at only where an upper bound on all patterns with five 3/2 says that they may win.
    """
    patterns = e8p_patterns().to(codebook.device)
    problem = f"shape {list(codebook.shape)}"
    if codebook.shape == (257, 8):
        levels = [float(codebook[row, -1]) for row in (0, 1, _FIVE, 256)]
        stored = _leveled(patterns, levels).to(codebook.dtype)
        expected = torch.cat([stored, codebook[256:, :1].expand(1, 8)])
        if torch.equal(codebook, expected) and 0 < levels[0] < levels[1] < levels[2]:
            chunks = [_encode(part.T.double(), levels) for part in x.split(_CHUNK)]
            return torch.cat(chunks)
        problem = "other patterns"
    raise VQFormatError(f"e8p_encode needs e8p_codebook() at some scale [257, 8]; got {problem}")


def _leveled(patterns: torch.Tensor, levels: list[float]) -> torch.Tensor:
    """`patterns` with levels[0..2], in float64, for 1/2, 3/2 and 5/2."""
    return torch.tensor(levels, dtype=torch.float64, device=patterns.device)[patterns.long()]


@cache
def _rows(device: torch.device) -> torch.Tensor:
    """Row of a pattern from (mask of its 3/2) + 256 * (mask of its 5/2), int64 [65536]."""
    bits = 1 << torch.arange(8)
    patterns = e8p_patterns()
    key = ((patterns == 1.5) * bits).sum(1) + 256 * ((patterns == 2.5) * bits).sum(1)
    return torch.zeros(65536, dtype=torch.int64).index_put_((key,), torch.arange(256)).to(device)


def _first(mask: torch.Tensor) -> torch.Tensor:
    """Index of the first true along dimension 0; unlike argmax, the same on every device."""
    index = torch.arange(mask.shape[0], device=mask.device).view(-1, *[1] * (mask.dim() - 1))
    return torch.where(mask, index, mask.shape[0] - 1).amin(0)


def _encode(x: torch.Tensor, levels: list[float]) -> torch.Tensor:
    """Codes [n] of the columns of float64 `x` [8, n]; levels: of 1/2, 3/2, 5/2 and of the shift.

    Maximises <y, s> - |s|^2 / 2 + (|x|^2 - |y|^2) / 2 over both shifts, y = x -/+ shift, and the
    signed patterns s. In natural signs <y, s> is a sum of |y| times a level.
    """
    low, middle, high, shift = levels
    y = torch.stack([x - shift, x + shift], dim=1)  # [8, 2, n]
    size = y.abs()
    coordinate = torch.arange(8, device=x.device).view(8, 1, 1)
    # a positive double sorts like its bits; the last three bits name the coordinate
    key = list(((size.view(torch.int64) & ~7) | (7 - coordinate)).unbind(0))
    for layer in _SORT:
        for i, j in layer:
            key[i], key[j] = torch.maximum(key[i], key[j]), torch.minimum(key[i], key[j])
    top = [k.view(torch.float64) for k in (*key[:5], key[7])]
    skew = x.sum(0) * shift
    offset = torch.stack([skew, -skew])
    natural = size.sum(0) * low + offset
    odd = ((y < 0).sum(0) & 1) == 1  # parity of the natural signs
    # patterns with k values 3/2 need k mod 2 flips; a flip too many costs the smallest |y|
    flipped = natural - 2 * low * top[5]
    even, uneven = torch.where(odd, flipped, natural), torch.where(odd, natural, flipped)

    # kind 0-4: that many 3/2; 5, 6: one 5/2 and none, one 3/2. Named in the score's last bits
    step, norm = middle - low, [0.5 * v * v for v in levels[:3]]
    scores = [even - 8 * norm[0]]
    for k, total in enumerate(itertools.accumulate(step * t for t in top[:5]), 1):
        scores.append(total + (uneven if k % 2 else even) - ((8 - k) * norm[0] + k * norm[1]))
    bound = scores.pop()  # of all patterns with five 3/2
    largest = (high - low) * top[0] - (7 * norm[0] + norm[2])
    scores += [largest + even, largest + step * top[1] + uneven + (norm[0] - norm[1])]
    tagged = torch.stack(scores).view(torch.int64)  # [7, 2, n]
    tag = torch.arange(7, device=x.device).view(7, 1, 1) + coordinate[:2].view(1, 2, 1) * 8
    best = ((tagged & ~15) | tag).view(torch.float64).amax((0, 1))
    kind = best.view(torch.int64) & 7
    minus = (best.view(torch.int64) & 8) != 0

    place = [1 << (7 - (torch.where(minus, k[1], k[0]) & 7)) for k in (*key[:4], key[7])]
    five_halves = kind > 4
    threes = place[0] * ((kind > 0) & ~five_halves) + place[1] * ((kind > 1) & (kind != 5))
    threes += place[2] * ((kind == 3) | (kind == 4)) + place[3] * (kind == 4)
    pattern = _rows(x.device)[threes + 256 * place[0] * five_halves]
    flip = place[4]
    needs_odd = (kind == 1) | (kind == 3) | (kind == 6)

    maybe = (bound > best).any(0).nonzero()[:, 0]
    if len(maybe):
        size, odd_maybe = size[:, :, maybe], odd[:, maybe]
        extra = _leveled(e8p_patterns()[_EXTRA:].to(x.device), levels)
        product = extra[:, :, None, None] * size  # [29, 8, 2, maybe]
        score = product.sum(1) + offset[:, maybe] - 0.5 * extra[0].square().sum()
        score = (score - 2 * torch.where(odd_maybe, 0.0, product.amin(1))).flatten(0, 1)
        value = score.amax(0)
        won = value > best[maybe]
        winner = _first(score[:, won] == value[won])
        index, row, sign = maybe[won], winner // 2, winner % 2
        minus[index] = sign == 1
        pattern[index] = row + _EXTRA
        chosen = product[row, :, sign, won.nonzero()[:, 0]].T  # [8, won]
        flip[index] = 1 << _first(chosen == chosen.amin(0))
        needs_odd[index] = True

    signs = ((torch.where(minus, y[:, 1], y[:, 0]) < 0) << coordinate[:, :, 0]).sum(0)
    signs ^= flip * (torch.where(minus, odd[1], odd[0]) != needs_odd)
    return pattern + ((signs & 127) << 8) + (minus.long() << 15)
