"""Problems of attention over coded caches (attention.cu): tapes, static caches and pages."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...codegen import choose_attention
from ...codegen.attention_plan import TOKENS, AttentionPlan, Mask
from ...codegen.choose_attention import MOST_QUERIES, AttentionProblem, attendable, misfit, splits
from ...codegen.device import Arch
from ...codegen.plan import Dtype
from ...formats.catalog import KV_SCHEMES, TURBOQUANT_KV_SCHEMES, KVScheme
from ...ops.attention import attention
from ...ops.paged import attention_paged
from ...ops.static import attention_static
from . import caches
from .case import DTYPES, close
from .cover import Features, covering, first_sizes

SCHEMES: dict[str, KVScheme] = KV_SCHEMES | TURBOQUANT_KV_SCHEMES
DIMS = (*((dim, dim) for dim in range(16, 257, 16)), (192, 128), (64, 96), (32, 48))
PAGES = (64, 256)
WINDOW, SINKS = 64, 4
# Beyond them no chooser's bucket is looked for.
LARGEST_BATCH, LONGEST, MOST_COLUMNS = 4096, 1 << 17, 128
_SHARE = 4  # `cuda_attention._USUAL`: pages are chosen for so many times fewer than there may be
_TURNS = 1000  # tokens that make each warp of a block take several steps, if the bucket has as many
_SOFTCAP = 20.0


@dataclass(frozen=True)
class AttentionCase:
    """A few queries over a cache.

    Args:
        scheme: name of the `KVScheme`.
        dims: numbers of a key and of a value.
        rows: of the batch.
        heads: of keys and values.
        share: query heads that share one of them.
        queries: of a row.
        tokens: that have codes, of a static cache its capacity, of pages as many as there may be.
        static: whether the cache is static.
        page: tokens of a page; 0 = a tape.
        dtype: of queries, floats and the result.
        mask: kind of the mask.
        softcapped: whether logits are capped.
    """

    scheme: str
    dims: tuple[int, int]
    rows: int
    heads: int
    share: int
    queries: int
    tokens: int
    static: bool
    page: int
    dtype: str
    mask: Mask
    softcapped: bool

    @property
    def name(self) -> str:
        """What it is."""
        kind = f"pages of {self.page}" if self.page else "static" if self.static else "tape"
        return (
            f"attention {self.scheme} {self.dims[0]}/{self.dims[1]} {self.rows} x {self.heads} x "
            f"{self.share} heads, {self.queries} queries, {self.tokens} tokens, {kind}, "
            f"{self.dtype}, mask {self.mask.value}{', softcap' * self.softcapped}"
        )

    def problem(self, arch: Arch) -> AttentionProblem:
        """What the backend asks the chooser."""
        scheme, tokens = SCHEMES[self.scheme], self.tokens // (_SHARE if self.page else 1)
        return AttentionProblem(
            scheme.key, scheme.value, *self.dims, self.share * self.queries, Dtype(self.dtype),
            self.mask, self.softcapped, choose_attention.token_bucket(tokens), arch, self.page,
            choose_attention.group_bucket(self.rows * self.heads),
        )  # fmt: skip

    def plan(self, arch: Arch) -> AttentionPlan:
        """Of the kernel that runs it."""
        plan = choose_attention.choose(self.problem(arch))
        assert plan is not None, f"no plan for {self.name}"
        return plan

    def plans(self, arch: Arch) -> Sequence[AttentionPlan]:
        """See `Case`."""
        return (self.plan(arch),)

    def features(self, arch: Arch) -> Features:
        """See `Case`."""
        plan, asked = self.plan(arch), self.problem(arch)
        across = -(-asked.columns // plan.queries)
        count = splits(plan, self.rows * self.heads * across, -(-self.tokens // TOKENS), arch)
        way = (plan.query_tiles, plan.turns, plan.paired, across > 1)
        block, bucket = (plan.threads, plan.resident), (asked.groups, asked.tokens, bool(self.page))
        usual = self.dims == (128, 128)
        return {
            "each size of heads": (self.scheme, self.dims),
            "each size of heads by queries": (self.dims, way),
            "each size of heads by block": (self.dims, block, plan.steps, plan.depth),
            "each block of a bucket": (self.scheme, bucket, block),
            "each way of a bucket": (self.scheme, *bucket[:2], way) if usual else None,
            "scheme": self.scheme,
            "bucket": bucket,
            "page": self.page or self.static,
            "queries of a kv head": way,
            "one query": self.queries == 1,
            "dtype": self.dtype,
            "mask": self.mask,
            "softcapped": self.softcapped,
            "block": block,
            "steps": (plan.steps, plan.depth),
            "split": count > 1,
        }

    def inputs(self, device: torch.device) -> Any:
        """A query and its cache."""
        dtype = DTYPES[self.dtype]
        heads = self.heads * self.share
        query = torch.randn(self.rows, heads, self.queries, self.dims[0], device=device).to(dtype)
        return query, self._cached(dtype, device), self._mask(device)

    def _cached(self, dtype: torch.dtype, device: torch.device) -> caches.Cached:
        scheme = SCHEMES[self.scheme]
        if self.page:
            return caches.pages(
                scheme, dtype, device, self.rows, self.heads, self.dims[0], self.tokens, self.page
            )
        make = caches.static if self.static else caches.tape
        return make(
            scheme, dtype, device, self.rows, self.heads, self.dims, self.tokens, self.queries,
            SINKS, WINDOW,
        )  # fmt: skip

    def _mask(self, device: torch.device) -> Tensor | None:
        """Causal, and a fifth of the rest is hidden; or something to add."""
        if self.mask is Mask.NONE:
            return None
        shape = 1, 1, self.queries, self.tokens + WINDOW
        causal = torch.ones(shape[2:], dtype=torch.bool, device=device)
        causal = causal.tril(shape[3] - shape[2])[None, None]
        if self.mask is Mask.BOOL:
            shown = torch.rand(shape, device=device) > 0.2
            shown[..., 0] = True
            return causal & shown
        added = torch.randn(shape, device=device).masked_fill(~causal, -1e4)
        return added.to(DTYPES[self.mask.value])

    @property
    def _options(self) -> dict[str, Any]:
        softcap = _SOFTCAP if self.softcapped else 0.0
        return {"scaling": self.dims[0] ** -0.5, "softcap": softcap}

    def run(self, inputs: Any) -> tuple[Tensor, ...]:
        """See `Case`."""
        query, cached, mask = inputs
        if self.page:
            return (attention_paged(query, cached, **self._options),)
        if self.static:
            return (attention_static(query, cached, mask=mask, **self._options),)
        return (attention(query, cached, mask=mask, **self._options),)

    def check(self, inputs: Any, found: tuple[Tensor, ...]) -> None:
        """Weights are rounded to fp16 or, for floats, to the dtype, and so is the result: each
        loses at most half an eps of its numbers, logits a little."""
        query, cached, mask = inputs
        exact = caches.exact(query, cached, mask, **self._options)
        (out,) = found
        bound = torch.finfo(out.dtype).eps + 2.0**-10
        largest = exact.abs().max() + caches.largest_value(cached) / 4
        close(out.flatten(0, 2), exact.flatten(0, 2), 2 * bound, float(2 * bound * largest))
        every = (out.double() - exact).norm() / exact.norm()
        assert float(every) <= bound, f"the error is {float(every):.2e} of the norm"


def cases(arch: Arch) -> list[AttentionCase]:
    """Problems that meet every pair of values of features that occurs."""
    return list(_cases(arch))


@functools.cache
def _cases(arch: Arch) -> tuple[AttentionCase, ...]:
    return tuple(covering(domain(arch), lambda case: case.features(arch)))


@functools.cache
def domain(arch: Arch) -> tuple[AttentionCase, ...]:
    """Every scheme of another plan, every size of heads, number of queries of a kv head that makes
    another plan, and bucket of rows times kv heads and of tokens; dtypes, masks, soft-caps, pages
    and static caches are dealt out to them."""
    return tuple(_domain(arch))


def _domain(arch: Arch) -> Iterator[AttentionCase]:
    groups = [-(-size // 2) * 2 for size in buckets_of_groups().values()]
    tokens = list(buckets_of_tokens().values())
    sizes = list(itertools.product(groups, tokens, (False, True)))
    number = 0
    for name, dims in itertools.product(schemes(arch), DIMS):
        scheme = SCHEMES[name]
        if not has_kernel(scheme, dims, arch):
            continue
        for columns in _columns(scheme, dims, arch).values():
            for count, size, paged in sizes:
                if paged and not _has_pages(scheme, dims):
                    continue
                number += 1
                yield _dealt(name, dims, columns, count, size, paged, number)


def has_kernel(scheme: KVScheme, dims: tuple[int, int], arch: Arch) -> bool:
    """Whether the backend has a kernel for such a cache."""
    return not (
        attendable(scheme.key, dims[0], "keys")
        or attendable(scheme.value, dims[1], "values")
        or misfit(scheme.key, scheme.value, *dims, arch)
    )


def _has_pages(scheme: KVScheme, dims: tuple[int, int]) -> bool:
    """Whether a server keeps such rows in pages (`cuda_kv_supports.append_paged`)."""
    return dims[0] == dims[1] and scheme.key.has_scale and scheme.value.has_scale


def _dealt(
    name: str,
    dims: tuple[int, int],
    columns: int,
    groups: int,
    tokens: int,
    paged: bool,
    number: int,
) -> AttentionCase:
    """The `number`-th problem of its bucket."""
    heads = next(heads for heads in (8, 2, 1) if groups % heads == 0 and groups >= 2 * heads)
    ways = [(columns // n, n) for n in range(1, MOST_QUERIES + 1) if columns % n == 0]
    share, queries = ways[number // 3 % len(ways)]
    mask = Mask.NONE if paged else list(Mask)[number // 5 % len(Mask)]
    page = PAGES[number // 7 % len(PAGES)] if paged else 0
    longest = tokens * _SHARE if paged else max(tokens, _TURNS)
    if choose_attention.token_bucket(tokens) == choose_attention.token_bucket(_TURNS) and paged:
        longest = _TURNS * _SHARE
    return AttentionCase(
        name, dims, groups // heads, heads, share, queries, longest,
        not paged and bool(number // 2 % 2), page, ("bfloat16", "float16")[number // 11 % 2], mask,
        bool(number // 13 % 2),
    )  # fmt: skip


def buckets_of_groups() -> dict[Any, int]:
    """The smallest number of rows times kv heads of every bucket."""
    return first_sizes(lambda n: choose_attention.group_bucket(n), LARGEST_BATCH)


def buckets_of_tokens() -> dict[Any, int]:
    """The smallest number of tokens of every bucket."""
    return first_sizes(lambda n: choose_attention.token_bucket(n), LONGEST)


def schemes(arch: Arch) -> list[str]:
    """Names of the catalogue that have kernels; of several with the same plans, the first."""
    found: dict[Any, str] = {}
    for name, scheme in SCHEMES.items():
        if has_kernel(scheme, (64, 64), arch):
            asked = _asked(scheme, (64, 64), 1, arch)
            found.setdefault(choose_attention.plan_of(asked, 256, 1, 1, 2), name)
    return list(found.values())


def _asked(scheme: KVScheme, dims: tuple[int, int], columns: int, arch: Arch) -> AttentionProblem:
    return AttentionProblem(
        scheme.key, scheme.value, *dims, columns, Dtype.FLOAT16, Mask.NONE, False,
        choose_attention.SHORT, arch,
    )  # fmt: skip


def _columns(scheme: KVScheme, dims: tuple[int, int], arch: Arch) -> dict[Any, int]:
    """The smallest number of queries of a kv head for every way in which tiles have them; a power
    of two where there is one."""

    def way(columns: int) -> tuple[int, int, bool, bool]:
        asked = replace(_asked(scheme, dims, 1, arch), columns=columns)
        plan = choose_attention.plan_of(asked, 256, 1, 1, 2)
        return plan.query_tiles, plan.turns, plan.paired, columns > plan.queries

    sizes = [1 << i for i in range(MOST_COLUMNS.bit_length())]
    found: dict[Any, int] = {}
    for size in [*sizes, *(n for n in range(MOST_COLUMNS) if n % 3 == 0 and n)]:
        found.setdefault(way(size), size)
    return found
