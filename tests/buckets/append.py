"""Problems of keys and values that become codes (append.cu): tapes and pages."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_vq.backends.cuda.kv.append import FEW_ROWS, FEW_TOKENS
from hf_vq.codegen.families.kv_append import CELLS, HEAD_DIMS, append_plan, appendable
from hf_vq.codegen.jit.device import Arch
from hf_vq.codegen.kv_plan import AppendPlan
from hf_vq.codegen.plan import Dtype
from hf_vq.formats.catalog import KV_SCHEMES, TURBOQUANT_KV_SCHEMES, KVScheme
from hf_vq.formats.packing import packed_size, unpack_bits
from hf_vq.formats.scheme import VQScheme
from hf_vq.ops import kv_append
from hf_vq.ops.layout import ROWS
from hf_vq.ops.library import parse
from hf_vq.ops.reference import codes as reference
from hf_vq.transforms import rotate
from tests.fixtures.kv.views import one_side

from . import caches
from .attention import PAGES
from .case import DTYPES, kv_codebook
from .cover import Features, covering
from .linear import of_plan

SCHEMES: dict[str, KVScheme] = KV_SCHEMES | TURBOQUANT_KV_SCHEMES
TOKENS = (1, 5, 40, 1200)  # one, few, few rows but many tokens, and many
ROWS_OF_BATCH, HEADS = 2, 3
AT = 3  # index of the first new token in the buffer
FIRST = 1  # that of the cache's first token
_EPS = torch.finfo(torch.float32).eps
_AT_A_TIME = 32  # tokens of which all distances are computed


@dataclass(frozen=True)
class AppendCase:
    """New keys or values, to a tape or to pages.

    Args:
        spec: of the scheme.
        dim: numbers of a row.
        tokens: of each of `ROWS_OF_BATCH` rows; of pages there is one.
        dtype: of them.
        centred: whether a mean is subtracted.
        aligned: whether rows begin at multiples of 16 bytes.
        page: tokens of a page; 0 = a tape.
        rotary: whether a rotary mean is subtracted; not in pages.
    """

    spec: str
    dim: int
    tokens: int
    dtype: str
    centred: bool
    aligned: bool
    page: int
    rotary: bool = False

    @property
    def name(self) -> str:
        """What it is."""
        return (
            f"append {self.spec} {self.tokens} x {self.dim} {self.dtype}{', mean' * self.centred}"
            f"{', rotary mean' * self.rotary}{'' if self.aligned else ', not aligned'}, "
            f"{f'pages of {self.page}' if self.page else 'tape'}"
        )

    @property
    def batch(self) -> int:
        """Rows of the batch."""
        return 1 if self.page else ROWS_OF_BATCH

    def plan(self, arch: Arch) -> AppendPlan:
        """Of the kernel that runs it."""
        scheme, rows = parse(self.spec), self.batch * HEADS * self.tokens
        few = rows <= FEW_ROWS * arch.sms if scheme.has_scale else self.tokens <= FEW_TOKENS
        grid = scheme.vector_size == 2 and scheme.entry_bits in CELLS and scheme.has_scale
        return append_plan(
            scheme, self.dim, Dtype(self.dtype), centred=self.centred, aligned=self.aligned,
            few=few, grid=grid, page=self.page, rotary=self.rotary,
        )  # fmt: skip

    def plans(self, arch: Arch) -> Sequence[AppendPlan]:
        """See `Case`."""
        return (self.plan(arch),)

    def features(self, arch: Arch) -> Features:
        """See `Case`."""
        return {
            "scheme": self.spec,
            "one token": self.tokens == 1,
            "type": self.dtype,
            **of_plan(self.plan(arch)),
        }

    def inputs(self, device: torch.device) -> Any:
        """Rows of very different sizes, their means, a codebook, and where they go."""
        scheme, dim, batch, count = parse(self.spec), self.dim, self.batch, self.tokens
        size = torch.ones(count, 1, device=device)
        size[::5] = 100
        pad = 8 if self.aligned else 3
        whole = 3 * torch.randn(batch, HEADS, count, dim + pad, device=device) * size + 1
        begin, turning = 0 if self.aligned else 1, None
        if self.rotary:  # keys have it
            turning = caches.turning(batch, HEADS, dim, device)
            whole[..., begin : begin + dim] += turning.at(_positions(count, device))
        x = whole.to(DTYPES[self.dtype])[..., begin : begin + dim]
        mean = torch.randn(batch, HEADS, 1, dim, device=device) if self.centred else None
        book = kv_codebook(scheme, HEADS, dim, device)
        width = packed_size(dim // scheme.vector_size, scheme.entry_bits)
        pages = -(-2 * count // self.page) if self.page else 0
        where = (pages, HEADS, self.page) if self.page else (batch, HEADS, AT + count + 3)
        codes = torch.randint(256, (*where, width), dtype=torch.uint8, device=device)
        if self.page:  # pages lie at multiples of 16 bytes
            apart = -(-codes[0].numel() // 16) * 16
            room = codes.new_zeros(pages, apart)
            codes = room[:, : codes[0].numel()].unflatten(1, codes.shape[1:])
        scale = torch.randn(*where, scheme.row_numbers, device=device).half()
        slots = None
        if self.page:
            slots = torch.randperm(pages * self.page, device=device)[:count]
        return x, mean, turning, book, codes, scale, slots

    def run(self, inputs: Any) -> tuple[Tensor, ...]:
        """See `Case`."""
        x, mean, turning, book, codes, scale, slots = inputs
        codes, scale = _copy(codes), scale.clone()
        append_keys(x, mean, turning, book, codes, scale, FIRST, AT - FIRST, self.spec, slots)
        return codes, scale

    def check(self, inputs: Any, found: tuple[Tensor, ...]) -> None:
        """Nearest codes, their unbiased scales, and nothing else touched."""
        x, mean, turning, book, before, scale_before, slots = inputs
        (codes, scale), scheme = found, parse(self.spec)
        if slots is None:
            new = slice(AT, AT + self.tokens)
            for was, now in ((before, codes), (scale_before, scale)):
                for rest in (slice(0, AT), slice(AT + self.tokens, None)):
                    assert torch.equal(was[:, :, rest], now[:, :, rest]), "others were written"
            codes, scale = codes[:, :, new], scale[:, :, new]
        else:
            pages = codes, scale, before, scale_before
            flat = [part.transpose(0, 1).flatten(1, 2)[None] for part in pages]
            others = torch.ones(flat[0].shape[2], dtype=torch.bool, device=slots.device)
            others[slots] = False
            for now, was in ((flat[0], flat[2]), (flat[1], flat[3])):
                assert torch.equal(now[:, :, others], was[:, :, others]), "others were written"
            codes, scale = flat[0][:, :, slots], flat[1][:, :, slots]
        check_codes(x, mean, turning, book, codes, scale, scheme)


def _copy(codes: Tensor) -> Tensor:
    """A copy whose pages are as far apart."""
    copy = torch.empty_strided(codes.shape, codes.stride(), dtype=codes.dtype, device=codes.device)
    return copy.copy_(codes)


def _positions(count: int, device: torch.device) -> Tensor:
    """Of the new tokens of a tape: those before them have codes already."""
    return torch.arange(AT - FIRST, AT - FIRST + count, device=device)


def append_keys(
    x: Tensor,
    mean: Tensor | None,
    turning: caches.Turning | None,
    book: Tensor,
    codes: Tensor,
    scale: Tensor,
    first: int,
    position: int,
    spec: str,
    slots: Tensor | None = None,
) -> None:
    """Encode keys [B, H, n, D] by `kv_append` to tokens `position`, `position` + 1, .. of a cache
    whose first token is `first` in the buffer, or to slots of pages."""
    view, tokens = one_side(x, mean, book, codes, scale, first, spec, ROWS), position + x.shape[2]
    key = view.key._replace(recent=x)
    view = view._replace(key=key, max_seqlen=tokens, num_coded=tokens)
    view = view if turning is None else turning.added_to(view)
    kv_append(x, x[:, :, :0], view, slots)


def check_codes(
    x: Tensor,
    mean: Tensor | None,
    turning: caches.Turning | None,
    book: Tensor,
    codes: Tensor,
    scale: Tensor,
    scheme: VQScheme,
) -> None:
    """Raise AssertionError unless codes [B, H, n, bytes] are the nearest, as far as float32 can
    tell, and scales are unbiased; of integers, unless both are those of the specification, or with
    a rotary mean those of float64."""
    dim = x.shape[3]
    centred = x.float() if mean is None else x.float() - mean
    slack = centred.new_zeros(1, 1, 1, 1, dtype=torch.float64)  # norm of what a row is wrong by
    if turning is not None:
        centred = centred.double() - turning.at(_positions(x.shape[2], x.device))
        # cos and sin are wrong by 2^-20 each, so a pair by 2^-19.5; and the difference is rounded.
        slack = 2.0**-19 * turning.mean.double().norm(dim=-1, keepdim=True)
        slack = slack + 2.0**-24 * centred.norm(dim=-1, keepdim=True)
    index = unpack_bits(codes, scheme.entry_bits, dim // scheme.vector_size).long()
    if scheme.has_zero and turning is not None:
        _check_integers(rotate(centred, scheme), slack, index, scale, (1 << scheme.entry_bits) - 1)
        return
    if scheme.has_zero:
        wanted = reference.encode_integers(centred.cpu(), None, scheme)
        for right, part in zip(wanted, (codes, scale), strict=True):
            assert torch.equal(part.cpu(), right), "not the integers of the specification"
        return
    slack = slack.expand(*x.shape[:3], 1)
    for begin in range(0, x.shape[2], _AT_A_TIME):
        some = slice(begin, begin + _AT_A_TIME)
        distance, least = _distances(centred[:, :, some], slack[:, :, some], book, scheme)
        chosen = distance.gather(-1, index[:, :, some, :, None])[..., 0]
        far = int((chosen > distance.amin(-1) + least).sum())
        assert not far, f"{far} codes are not the nearest, of tokens from {begin} on"
    if scheme.has_scale:
        rotated = rotate(centred.double(), scheme)
        entries = book[0].double()[index].flatten(-2)
        energy, along = rotated.square().sum(-1), (rotated * entries).sum(-1)
        exact = torch.where(energy == 0, 0, energy / along)
        error = (scale[..., 0].double() - exact).abs()
        # Half a unit in the last place of fp16, and float32 sums of D terms.
        rounded = exact.abs() * (2.0**-11 + dim * 2.0**-24) + 2.0**-25
        row = slack[..., 0] * (2 / energy.sqrt() + entries.norm(dim=-1) / along.abs())
        rounded = rounded + torch.where(slack[..., 0] == 0, 0, exact.abs() * row)
        bad = int((error > rounded).sum())
        assert not bad, f"{bad} scales are wrong"


def _check_integers(rows: Tensor, slack: Tensor, codes: Tensor, numbers: Tensor, top: int) -> None:
    """Scales and zeros are fp16 numbers, codes integers, of rows that are wrong by `slack`."""
    scale, zero = numbers.double().split(1, -1)
    low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    largest = torch.maximum(high, -low)
    wanted = torch.maximum((high - low) / top, largest / 1024)
    half = 2.0**-11 + 2.0**-22  # a unit in the last place of fp16, and of float32
    wrong = (scale - wanted).abs() > half * wanted + 2 * slack / top + 2.0**-25
    assert not wrong.any(), f"{int(wrong.sum())} scales are wrong"
    wrong = (zero + low / scale).abs() > half * (low / scale).abs() + slack / scale + 2.0**-25
    assert not wrong.any(), f"{int(wrong.sum())} zeros are wrong"
    place = rows / scale + zero
    rounded = 0.5 + slack / scale + 2.0**-22 * ((rows / scale).abs() + zero.abs())
    wrong = (codes - place.clamp(0, top)).abs() > rounded
    assert not wrong.any(), f"{int(wrong.sum())} integers are wrong"


def _distances(x: Tensor, wrong: Tensor, book: Tensor, scheme: VQScheme) -> tuple[Tensor, Tensor]:
    """Squared distances [B, H, n, S, entries] in float64, and what float32 may be wrong by.

    A search compares sums of x + 1 terms, each at most (|u| + |b|)^2 and rounded once; of both.
    """
    rows = rotate(x.double(), scheme)
    if scheme.has_scale:
        factor = 1 / (rows.square().mean(-1, keepdim=True)).sqrt().clamp_min(1e-30)
        rows, wrong = rows * factor, wrong * factor
        books = book[0].double()
    else:
        books = book.double()[:, None]
    vectors = rows.unflatten(-1, (-1, scheme.vector_size))[..., None, :]
    size = vectors.norm(dim=-1) + books.norm(dim=-1)
    # The rotation's own rounding: log2(D) additions of numbers up to the row's norm; the factor's.
    rotated = 12 * rows.norm(dim=-1)[..., None, None] * size * (scheme.rotation != "none")
    slack = _EPS * ((2 * scheme.vector_size + 2) * size.square() + rotated)
    # A row that is wrong by d, and by as much in its own direction: each changes 2 <u, b1 - b2>.
    slack = slack + 8 * wrong[..., None] * size
    return (vectors - books).square().sum(-1), slack.amax(-1)


def cases(arch: Arch) -> list[AppendCase]:
    """Problems that meet every value of features, and every pair that occurs."""
    return list(_cases(arch))


@functools.cache
def _cases(arch: Arch) -> tuple[AppendCase, ...]:
    return tuple(covering(domain(arch), lambda case: case.features(arch)))


@functools.cache
def domain(arch: Arch) -> tuple[AppendCase, ...]:
    """Every scheme of keys or values, size of head, number of tokens, tapes and pages, dtype and
    alignment, with and without a rotary mean; means are dealt out to them."""
    return tuple(_domain())


def _domain() -> Iterator[AppendCase]:
    parts = {part.spec(): part for one in SCHEMES.values() for part in (one.key, one.value)}
    number = 0
    for (spec, scheme), dim, tokens, page in itertools.product(
        parts.items(), HEAD_DIMS, TOKENS, (0, *PAGES)
    ):
        if appendable(scheme, dim) or (page and not scheme.has_scale):
            continue
        for dtype, aligned in itertools.product(DTYPES, (True, False)):
            number += 1
            for rotary in (False,) if page else (False, True):
                # Means of codebooks for channel groups are calibrated ones: with what turns.
                centred = bool(number // 6 % 2) and (scheme.has_scale or rotary)
                yield AppendCase(spec, dim, tokens, dtype, centred, aligned, page, rotary)
