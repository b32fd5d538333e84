"""Problems of keys and values that become codes: append.cu (tapes, pages), kv_step.cu."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_vq.backends.cuda.kv.append import FEW_ROWS, FEW_TOKENS
from hf_vq.codegen.families.kv_append import CELLS, HEAD_DIMS, append_plan, appendable, store_plan
from hf_vq.codegen.jit.device import Arch
from hf_vq.codegen.kv_plan import AppendPlan, StorePlan
from hf_vq.codegen.plan import Dtype
from hf_vq.formats.catalog import KV_SCHEMES, TURBOQUANT_KV_SCHEMES, KVScheme
from hf_vq.formats.packing import packed_size, unpack_bits
from hf_vq.formats.scheme import VQScheme
from hf_vq.ops import KVCacheView, KVSide, kv_append
from hf_vq.ops.kv import arguments_of
from hf_vq.ops.layout import ROWS
from hf_vq.ops.library import parse
from hf_vq.ops.reference import codes as reference
from hf_vq.ops.reference import kv_static as static_reference
from hf_vq.transforms import rotate
from tests.fixtures.kv.views import append_kv

from .attention import PAGES
from .case import DTYPES, kernel_of, kv_codebook
from .cover import Features, covering
from .linear import of_plan

SCHEMES: dict[str, KVScheme] = KV_SCHEMES | TURBOQUANT_KV_SCHEMES
TOKENS = (1, 5, 40, 1200)  # one, few, few rows but many tokens, and many
ROWS_OF_BATCH, HEADS = 2, 3
AT = 3  # the first new token
STEPS = ((1,) * 12, (3, 1, 4, 8, 1))  # of a static cache
_SLOTS, _WINDOW, _SINKS, _CAPACITY = 13, 5, 2, 40  # of it
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
    """

    spec: str
    dim: int
    tokens: int
    dtype: str
    centred: bool
    aligned: bool
    page: int

    @property
    def name(self) -> str:
        """What it is."""
        return (
            f"append {self.spec} {self.tokens} x {self.dim} {self.dtype}{', mean' * self.centred}"
            f"{'' if self.aligned else ', not aligned'}, "
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
            few=few, grid=grid, page=self.page,
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
        """Rows of very different sizes, their mean, a codebook, and where they go."""
        scheme, dim, batch, count = parse(self.spec), self.dim, self.batch, self.tokens
        size = torch.ones(count, 1, device=device)
        size[::5] = 100
        pad = 8 if self.aligned else 3
        whole = 3 * torch.randn(batch, HEADS, count, dim + pad, device=device) * size + 1
        begin = 0 if self.aligned else 1
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
        return x, mean, book, codes, scale, slots

    def run(self, inputs: Any) -> tuple[Tensor, ...]:
        """See `Case`."""
        x, mean, book, codes, scale, slots = inputs
        codes, scale = _copy(codes), scale.clone()
        append_kv(x, mean, book, codes, scale, AT, self.spec, ROWS, slots)
        return codes, scale

    def check(self, inputs: Any, found: tuple[Tensor, ...]) -> None:
        """Nearest codes, their unbiased scales, and nothing else touched."""
        x, mean, book, before, scale_before, slots = inputs
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
        check_codes(x, mean, book, codes, scale, scheme)


def _copy(codes: Tensor) -> Tensor:
    """A copy whose pages are as far apart."""
    copy = torch.empty_strided(codes.shape, codes.stride(), dtype=codes.dtype, device=codes.device)
    return copy.copy_(codes)


def check_codes(
    x: Tensor, mean: Tensor | None, book: Tensor, codes: Tensor, scale: Tensor, scheme: VQScheme
) -> None:
    """Raise AssertionError unless codes [B, H, n, bytes] are the nearest, as far as float32 can
    tell, and scales are unbiased; of integers, unless both are those of the specification."""
    dim = x.shape[3]
    centred = x.float() if mean is None else x.float() - mean
    if scheme.has_zero:
        wanted = reference.encode_integers(centred.cpu(), None, scheme)
        for right, part in zip(wanted, (codes, scale), strict=True):
            assert torch.equal(part.cpu(), right), "not the integers of the specification"
        return
    index = unpack_bits(codes, scheme.entry_bits, dim // scheme.vector_size).long()
    for begin in range(0, x.shape[2], _AT_A_TIME):
        some = slice(begin, begin + _AT_A_TIME)
        distance, slack = _distances(centred[:, :, some], book, scheme)
        chosen = distance.gather(-1, index[:, :, some, :, None])[..., 0]
        far = int((chosen > distance.amin(-1) + slack).sum())
        assert not far, f"{far} codes are not the nearest, of tokens from {begin} on"
    if scheme.has_scale:
        rotated = rotate(centred.double(), scheme)
        entries = book[0].double()[index].flatten(-2)
        energy = rotated.square().sum(-1)
        exact = torch.where(energy == 0, 0, energy / (rotated * entries).sum(-1))
        error = (scale[..., 0].double() - exact).abs()
        # Half a unit in the last place of fp16, and float32 sums of D terms.
        bad = int((error > exact.abs() * (2.0**-11 + dim * 2.0**-24) + 2.0**-25).sum())
        assert not bad, f"{bad} scales are wrong"


def _distances(x: Tensor, book: Tensor, scheme: VQScheme) -> tuple[Tensor, Tensor]:
    """Squared distances [B, H, n, S, entries] in float64, and what float32 may be wrong by.

    A search compares sums of x + 1 terms, each at most (|u| + |b|)^2 and rounded once; of both.
    """
    rows = rotate(x.double(), scheme)
    if scheme.has_scale:
        rows = rows / (rows.square().mean(-1, keepdim=True)).sqrt().clamp_min(1e-30)
        books = book[0].double()
    else:
        books = book.double()[:, None]
    vectors = rows.unflatten(-1, (-1, scheme.vector_size))[..., None, :]
    size = vectors.norm(dim=-1) + books.norm(dim=-1)
    # The rotation's own rounding: log2(D) additions of numbers up to the row's norm; the factor's.
    rotated = 12 * rows.norm(dim=-1)[..., None, None] * size * (scheme.rotation != "none")
    slack = _EPS * ((2 * scheme.vector_size + 2) * size.square() + rotated)
    return (vectors - books).square().sum(-1), slack.amax(-1)


@dataclass(frozen=True)
class StoreCase:
    """Steps of a static cache.

    Args:
        scheme: name of the `KVScheme`.
        dims: numbers of a key and of a value.
        dtype: of them.
        steps: tokens of each.
        measured: whether the mean of keys is found on the way.
    """

    scheme: str
    dims: tuple[int, int]
    dtype: str
    steps: tuple[int, ...]
    measured: bool

    @property
    def name(self) -> str:
        """What it is."""
        return f"store {self.scheme} {self.dims} {self.dtype} {self.steps} {self.measured}"

    def plan(self, arch: Arch) -> StorePlan:
        """Of the kernel that runs it."""
        scheme = SCHEMES[self.scheme]
        keys, values = (
            append_plan(
                part, dim, Dtype(self.dtype), centred=mean, aligned=True, few=True,
                grid=part.vector_size == 2 and part.entry_bits in CELLS and part.has_scale,
            )
            for part, dim, mean in (
                (scheme.key, self.dims[0], scheme.centre_keys),
                (scheme.value, self.dims[1], False),
            )
        )  # fmt: skip
        return store_plan(keys, values)

    def plans(self, arch: Arch) -> Sequence[StorePlan]:
        """See `Case`."""
        return (self.plan(arch),)

    def features(self, arch: Arch) -> Features:
        """See `Case`."""
        return {
            "each kernel": kernel_of(self.plan(arch)),
            "scheme": self.scheme,
            "type": self.dtype,
            "steps": self.steps,
            "measured": self.measured,
            "each dims": self.dims,
        }

    def inputs(self, device: torch.device) -> Any:
        """Keys and values of each step, and an empty cache full of what was there before."""
        scheme, dtype, shape = SCHEMES[self.scheme], DTYPES[self.dtype], (ROWS_OF_BATCH, HEADS)

        def side(part: VQScheme, dim: int, mean: Tensor | None) -> KVSide:
            width = packed_size(dim // part.vector_size, part.entry_bits)
            codes = torch.randint(256, (*shape, _CAPACITY, width), dtype=torch.uint8, device=device)
            scale = torch.randn(*shape, _CAPACITY, part.row_numbers, device=device).half()
            sink, ring = (
                torch.randn(*shape, count, dim, device=device).to(dtype)
                for count in (_SINKS, _SLOTS)
            )
            book = kv_codebook(part, HEADS, dim, device)
            return KVSide(codes, scale, book, mean, sink, ring, 0, part.spec(), ROWS)

        mean = torch.randn(*shape, 1, self.dims[0], device=device) if scheme.centre_keys else None
        known = torch.zeros(shape, dtype=torch.bool, device=device) if self.measured else None
        cached = KVCacheView(
            side(scheme.key, self.dims[0], mean), side(scheme.value, self.dims[1], None),
            torch.zeros(ROWS_OF_BATCH, dtype=torch.int64, device=device),
            torch.zeros((), dtype=torch.int64, device=device), None,
            known if scheme.centre_keys else None, _CAPACITY, _WINDOW, 0, 0,
        )  # fmt: skip
        new = [
            tuple(
                (2 * torch.randn(*shape, count, dim, device=device) + 1).to(dtype)
                for dim in self.dims
            )
            for count in self.steps
        ]
        return new, cached

    def run(self, inputs: Any) -> tuple[Tensor, ...]:
        """See `Case`."""
        new, before = inputs
        cached = _copied(before)
        for keys, values in new:
            kv_append(keys, values, cached)
        return tuple(part for part in arguments_of(cached).values() if isinstance(part, Tensor))

    def check(self, inputs: Any, found: tuple[Tensor, ...]) -> None:
        """Floats are those of the specification. Codes are those of `append` for each token that
        left the window, under the mean that was known then; what is not a token's is untouched."""
        new, before = inputs
        names = [n for n, part in arguments_of(before).items() if isinstance(part, Tensor)]
        now = before.replace(**dict(zip(names, found, strict=True)))
        wanted, tapes, length = _copied(before), _copied(before), 0
        for keys, values in new:
            known = None if wanted.key.mean is None else wanted.key.mean.clone()
            static_reference.kv_append(keys, values, wanted)
            mean = known  # it is found once, before the first token is encoded
            if (
                known is not None
                and wanted.key.mean is not None
                and not torch.equal(known, wanted.key.mean)
            ):
                mean = now.key.mean
            last = length + keys.shape[2] - _WINDOW
            for at in range(max(length - _WINDOW, 0), max(min(last, _CAPACITY), 0)):
                for side, mean_, to in (
                    (wanted.key, mean, tapes.key), (wanted.value, None, tapes.value)
                ):  # fmt: skip
                    row = side.recent[:, :, at % _SLOTS : at % _SLOTS + 1].contiguous()
                    append_kv(row, mean_, to.codebook, to.codes, to.scale, at, to.scheme, ROWS)
            length += keys.shape[2]
        right, is_, of_append = map(arguments_of, (wanted, now, tapes))
        floats = ("key_sinks", "value_sinks", "key_recent", "value_recent")
        for name in (*floats, "cache_seqlens", "key_mean_known"):
            both = right[name], is_[name]
            assert both == (None, None) or torch.equal(*both), f"{name} is wrong"
        if wanted.key.mean is not None:
            torch.testing.assert_close(now.key.mean, wanted.key.mean, rtol=1e-5, atol=1e-5)
        for name in ("key_codes", "value_codes", "key_scale", "value_scale"):
            assert torch.equal(is_[name], of_append[name]), f"{name} not of append"


def _copied(cached: KVCacheView) -> KVCacheView:
    """A copy, but for codebooks."""
    copy = cached.map(Tensor.clone)
    books = {"key_codebook": cached.key.codebook, "value_codebook": cached.value.codebook}
    return copy.replace(**books)


Appended = AppendCase | StoreCase


def cases(arch: Arch) -> list[Appended]:
    """Problems that meet every value of features, and every pair that occurs."""
    return list(_cases(arch))


@functools.cache
def _cases(arch: Arch) -> tuple[Appended, ...]:
    both = domain(arch)
    kinds = [[case for case in both if isinstance(case, kind)] for kind in (AppendCase, StoreCase)]
    return tuple(case for kind in kinds for case in covering(kind, lambda one: one.features(arch)))


@functools.cache
def domain(arch: Arch) -> tuple[Appended, ...]:
    """Every scheme of keys or values, size of head, number of tokens, tapes and pages; dtypes, mean
    and alignment are dealt out to them."""
    return (*_appends(), *_stores())


def _appends() -> Iterator[AppendCase]:
    parts = {part.spec(): part for one in SCHEMES.values() for part in (one.key, one.value)}
    number = 0
    for (spec, scheme), dim, tokens, page in itertools.product(
        parts.items(), HEAD_DIMS, TOKENS, (0, *PAGES)
    ):
        if appendable(scheme, dim) or (page and not scheme.has_scale):
            continue
        for dtype, aligned in itertools.product(DTYPES, (True, False)):
            number += 1
            centred = scheme.has_scale and bool(number // 6 % 2)
            yield AppendCase(spec, dim, tokens, dtype, centred, aligned, page)


def _stores() -> Iterator[StoreCase]:
    dims = [*((dim, dim) for dim in HEAD_DIMS), (192, 128), (64, 96)]
    for number, (both, name) in enumerate(itertools.product(dims, SCHEMES)):
        scheme = SCHEMES[name]
        if appendable(scheme.key, both[0]) or appendable(scheme.value, both[1]):
            continue
        for steps, dtype in itertools.product(STEPS, DTYPES):
            yield StoreCase(name, both, dtype, steps, bool(number % 2))
