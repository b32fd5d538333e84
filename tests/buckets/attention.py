"""Problems of attention over coded caches (attention.cu): tapes, static caches and pages."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from hf_vq.codegen.attention_plan import TOKENS, AttentionPlan, Mask
from hf_vq.codegen.families import kv_attention as choose_attention
from hf_vq.codegen.families.kv_attention import (
    MOST_QUERIES,
    AttentionProblem,
    attendable,
    misfit,
    splits,
)
from hf_vq.codegen.jit.device import Arch
from hf_vq.codegen.plan import Dtype, Plan
from hf_vq.formats.catalog import KV_SCHEMES, TURBOQUANT_KV_SCHEMES, KVScheme
from hf_vq.ops import KVCacheView, kv_attention

from . import caches
from .case import DTYPES, close, kernel_of
from .cover import Features, covering, first_sizes

SCHEMES: dict[str, KVScheme] = KV_SCHEMES | TURBOQUANT_KV_SCHEMES
ODD_DIMS = ((64, 96), (32, 48))  # of no model: not every kernel of them is run
USUAL_DIMS = (128, 128)
DIMS = (*((dim, dim) for dim in range(16, 257, 16)), (192, 128), *ODD_DIMS)
PAGES = (64, 256)
WINDOW, SINKS = 64, 4
# Beyond them no chooser's bucket is looked for.
LARGEST_BATCH, LONGEST, MOST_COLUMNS = 4096, 1 << 17, 128
_SHARE = 4  # `cuda_attention._USUAL`: pages are chosen for so many times fewer than there may be
_TURNS = 1000  # tokens that make each warp of a block take several steps, if the bucket has as many
_SOFTCAP = 20.0
# Fields of a plan that say how its tokens are coded, and how long they are.
CODED = {"one_codebook", *(f"{side}_{name}" for side in ("key", "value") for name in (
    "vector_size", "entry_bits", "fused", "learned", "integers", "block"))}  # fmt: skip
_LONG = {"key_dim", "value_dim", "key_block", "value_block"}
Sizes = tuple[list[int], list[int]]


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
        rotary: whether keys have a rotary mean.
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
    rotary: bool = False

    @property
    def name(self) -> str:
        """What it is."""
        kind = f"pages of {self.page}" if self.page else "static" if self.static else "tape"
        return (
            f"attention {self.scheme} {self.dims[0]}/{self.dims[1]} {self.rows} x {self.heads} x "
            f"{self.share} heads, {self.queries} queries, {self.tokens} tokens, {kind}, "
            f"{self.dtype}, mask {self.mask.value}{', softcap' * self.softcapped}"
            f"{', rotary mean' * self.rotary}"
        )

    def problem(self, arch: Arch) -> AttentionProblem:
        """What the backend asks the chooser."""
        scheme, tokens = SCHEMES[self.scheme], self.tokens // (_SHARE if self.page else 1)
        return AttentionProblem(
            scheme.key, scheme.value, *self.dims, self.share * self.queries, Dtype(self.dtype),
            self.mask, self.softcapped, choose_attention.token_bucket(tokens), arch, self.page,
            choose_attention.group_bucket(self.rows * self.heads), self.rotary,
        )  # fmt: skip

    def plan(self, arch: Arch) -> AttentionPlan:
        """Of the kernel that runs it."""
        plan = _chosen(self.problem(arch))
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
        way = (plan.query_tiles, plan.swizzle_orders, plan.paired, across > 1)
        block, bucket = (
            (plan.threads, plan.blocks_per_sm),
            (asked.groups, asked.tokens, bool(self.page)),
        )
        usual, plain = self.dims == USUAL_DIMS, self.mask is Mask.NONE and not self.softcapped
        run = must_run(plan) if self.dims not in ODD_DIMS else {}
        return {
            **run,
            **{f"{name} of a plain call": one if plain else None for name, one in run.items()},
            "each size of heads": (self.scheme, self.dims),
            "each size of heads of a rotary mean": (self.dims, self.rotary),
            "each size of heads by queries": (self.dims, way),
            "each size of heads by block": (self.dims, block, plan.step_tiles, plan.pipeline_depth),
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
            "rotary": self.rotary,
            "block": block,
            "step_tiles": (plan.step_tiles, plan.pipeline_depth),
            "split": count > 1,
        }

    def inputs(self, device: torch.device) -> Any:
        """A query and its cache."""
        dtype = DTYPES[self.dtype]
        heads = self.heads * self.share
        query = torch.randn(self.rows, heads, self.queries, self.dims[0], device=device).to(dtype)
        cached = self._cached(dtype, device)
        if self.rotary:
            rows, heads, _, dim = cached.key.recent.shape  # of pages, all rows share a mean
            cached = caches.turning(rows, heads, dim, device).added_to(cached)
        return query, cached, self._mask(device)

    def _cached(self, dtype: torch.dtype, device: torch.device) -> KVCacheView:
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
        return {"softmax_scale": self.dims[0] ** -0.5, "softcap": softcap}

    def run(self, inputs: Any) -> tuple[Tensor, ...]:
        """See `Case`."""
        query, cached, mask = inputs
        if self.page:
            return (kv_attention(query, cached, **self._options),)
        if self.static:
            return (kv_attention(query, cached, mask=mask, **self._options),)
        return (kv_attention(query, cached, mask=mask, **self._options),)

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


def must_run(plan: AttentionPlan) -> dict[str, Hashable]:
    """What of a plan some problem must have: the kernel.

    With a rotary mean there would be as many again. What it adds depends on queries, sizes and
    blocks, not on how tokens are coded; so kernels of usual heads are run, and of the others every
    one but for its scheme, and every one but for the size of its heads.
    """
    kernel = kernel_of(plan)
    if not plan.rotary:
        return {"each kernel": kernel}
    found: dict[str, Hashable] = {
        "each kernel of a rotary mean but for its scheme": _without(kernel, CODED),
        "each kernel of a rotary mean but for its heads": _without(kernel, _LONG),
    }
    if (plan.key_dim, plan.value_dim) == USUAL_DIMS:
        found["each kernel of a rotary mean"] = kernel
    return found


def _without(plan: Plan, names: set[str]) -> Hashable:
    values = {field.name: getattr(plan, field.name) for field in fields(plan)}
    return tuple((name, value) for name, value in values.items() if name not in names)


def cases(arch: Arch) -> list[AttentionCase]:
    """Problems that meet every kernel, and every pair of values of features that occurs."""
    return list(_cases(arch))


@functools.cache
def _cases(arch: Arch) -> tuple[AttentionCase, ...]:
    return tuple(covering(domain(arch), lambda case: case.features(arch)))


@functools.cache
def domain(arch: Arch) -> tuple[AttentionCase, ...]:
    """Every scheme of another plan and every size of heads, with all calls that choose other
    kernels (`of_heads`); then the buckets again, among which dtypes, masks, soft-caps, pages and
    static caches are dealt out."""
    found = sizes()
    return (
        *itertools.chain.from_iterable(of_heads(*one, found, arch) for one in every(arch)),
        *_mixed(found, arch),
    )


def every(arch: Arch) -> list[tuple[str, tuple[int, int]]]:
    """Schemes and sizes of heads that have kernels."""
    return [
        (name, dims)
        for name, dims in itertools.product(schemes(arch), DIMS)
        if has_kernel(SCHEMES[name], dims, arch)
    ]


def of_heads(name: str, dims: tuple[int, int], sizes: Sizes, arch: Arch) -> Iterator[AttentionCase]:
    """The smallest calls of a scheme and size of heads that choose each of its kernels: without
    mask and soft-cap for every bucket of queries of a kv head, of rows times kv heads and of
    tokens, with and without a rotary mean, then with them, where the registers that they take leave
    another one."""
    scheme, number = SCHEMES[name], 0
    means = (False, True) if has_kernel(scheme, dims, arch, True) else (False,)
    for columns in _columns(scheme, dims, arch, _blocks_across).values():
        for groups, tokens, rotary in itertools.product(*sizes, means):
            number += not rotary
            plain = replace(
                _dealt(name, dims, columns, groups, tokens, False, number),
                mask=Mask.NONE, softcapped=False, rotary=rotary,
            )  # fmt: skip
            yield plain
            mask = (Mask.BOOL, Mask.FLOAT32)[number % 2]
            both = replace(plain, mask=mask, softcapped=True)
            # A kernel that suits the most registers suits any number of them between.
            if kernel_of(both.plan(arch)) != kernel_of(plain.plan(arch)):
                yield from (replace(plain, mask=mask), replace(plain, softcapped=True), both)


def most_demanding(name: str, dims: tuple[int, int], arch: Arch) -> Iterator[AttentionCase]:
    """Calls that need the most registers, with every number of queries of a kv head."""
    scheme = SCHEMES[name]
    rotary = has_kernel(scheme, dims, arch, True)
    for number, columns in enumerate(_columns(scheme, dims, arch, _several_blocks).values()):
        case = _dealt(name, dims, columns, 2, 1, False, number)
        yield replace(case, mask=Mask.FLOAT32, softcapped=True, rotary=rotary)


def _mixed(sizes: Sizes, arch: Arch) -> Iterator[AttentionCase]:
    number = 0
    for name, dims in every(arch):
        scheme = SCHEMES[name]
        for columns in _columns(scheme, dims, arch, _several_blocks).values():
            for count, size, paged in itertools.product(*sizes, (False, True)):
                if paged and not _has_pages(scheme, dims):
                    continue
                number += 1
                case = _dealt(name, dims, columns, count, size, paged, number)
                rotary = bool(number // 17 % 2) and has_kernel(scheme, dims, arch, True)
                yield replace(case, rotary=rotary)


def sizes() -> Sizes:
    """Rows times kv heads, and tokens: the smallest of every bucket."""
    groups = [-(-size // 2) * 2 for size in buckets_of_groups().values()]
    return groups, list(buckets_of_tokens().values())


@functools.cache  # asked again for every feature, and by every test
def _chosen(problem: AttentionProblem) -> AttentionPlan | None:
    return choose_attention.choose(problem)


def has_kernel(scheme: KVScheme, dims: tuple[int, int], arch: Arch, rotary: bool = False) -> bool:
    """Whether the backend has a kernel for such a cache, whose keys have a rotary mean or not."""
    return not (
        attendable(scheme.key, dims[0], "keys")
        or attendable(scheme.value, dims[1], "values")
        or misfit(scheme.key, scheme.value, *dims, arch, rotary)
    )


def _has_pages(scheme: KVScheme, dims: tuple[int, int]) -> bool:
    """Whether a server keeps such rows in pages (`cuda_kv_supports.append`)."""
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
    longest = _turns(tokens) * (_SHARE if paged else 1)
    return AttentionCase(
        name, dims, groups // heads, heads, share, queries, longest,
        not paged and bool(number // 2 % 2), page, ("bfloat16", "float16")[number // 11 % 2], mask,
        bool(number // 13 % 2),
    )  # fmt: skip


def _turns(tokens: int) -> int:
    """The most tokens of the bucket, up to `_TURNS`; or `tokens`, if these are more."""
    bucket = choose_attention.token_bucket(tokens)
    largest = 2 * bucket if bucket < choose_attention.LONG else tokens
    return max(tokens, min(largest, _TURNS))


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
            found.setdefault(alike(scheme, arch), name)
    return list(found.values())


def alike(scheme: KVScheme, arch: Arch) -> AttentionPlan:
    """What schemes have in common that have the same plans."""
    return choose_attention.plan_of(_asked(scheme, (64, 64), 1, arch), 256, 1, 1, 2)


def _asked(scheme: KVScheme, dims: tuple[int, int], columns: int, arch: Arch) -> AttentionProblem:
    return AttentionProblem(
        scheme.key, scheme.value, *dims, columns, Dtype.FLOAT16, Mask.NONE, False,
        choose_attention.SHORT, arch,
    )  # fmt: skip


def _columns(
    scheme: KVScheme, dims: tuple[int, int], arch: Arch, more: Callable[[AttentionPlan, int], int]
) -> dict[Any, int]:
    """The smallest number of queries of a kv head for every way in which tiles have them; a power
    of two where there is one.

    Args:
        more: what else of a plan and such a number makes it another way.
    """

    def way(columns: int) -> tuple[int, int, bool, int]:
        asked = replace(_asked(scheme, dims, 1, arch), columns=columns)
        plan = choose_attention.plan_of(asked, 256, 1, 1, 2)
        return plan.query_tiles, plan.swizzle_orders, plan.paired, more(plan, columns)

    sizes = [1 << i for i in range(MOST_COLUMNS.bit_length())]
    found: dict[Any, int] = {}
    for size in [*sizes, *range(3, MOST_COLUMNS, 3), *range(1, MOST_COLUMNS)]:
        found.setdefault(way(size), size)
    return found


def _several_blocks(plan: AttentionPlan, columns: int) -> int:
    return columns > plan.queries


def _blocks_across(plan: AttentionPlan, columns: int) -> int:
    """Blocks that have the queries of a kv head: costs count columns, launches count queries."""
    return 1000 * -(-columns // plan.columns) + -(-columns // plan.queries)
