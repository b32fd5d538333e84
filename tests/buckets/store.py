"""Problems of steps of a static cache (kv_step.cu): floats, codes of what leaves the window, means
of keys."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_vq.codegen.families.kv_append import CELLS, HEAD_DIMS, append_plan, appendable, store_plan
from hf_vq.codegen.jit.device import Arch
from hf_vq.codegen.kv_plan import StorePlan
from hf_vq.codegen.plan import Dtype
from hf_vq.formats.catalog import KVScheme
from hf_vq.formats.packing import packed_size
from hf_vq.formats.scheme import VQScheme
from hf_vq.ops import KVCacheView, KVSide, kv_append
from hf_vq.ops.kv import arguments_of
from hf_vq.ops.layout import ROWS
from hf_vq.ops.reference import kv_static as static_reference

from . import caches
from .append import HEADS, ROWS_OF_BATCH, SCHEMES, append_keys
from .case import DTYPES, kernel_of, kv_codebook
from .cover import Features, covering

STEPS = ((1,) * 12, (3, 1, 4, 8, 1))  # tokens
NO, GIVEN, MEASURED = "no", "given", "measured"  # means of keys
_SLOTS, _WINDOW, _SINKS, _CAPACITY = 13, 5, 2, 40


@dataclass(frozen=True)
class StoreCase:
    """Steps of a static cache.

    Args:
        scheme: name of the `KVScheme`.
        dims: numbers of a key and of a value.
        dtype: of them.
        steps: tokens of each.
        mean: of keys: given, measured on the way, or none.
        rotary: whether it has a part that turns, too.
    """

    scheme: str
    dims: tuple[int, int]
    dtype: str
    steps: tuple[int, ...]
    mean: str
    rotary: bool = False

    @property
    def name(self) -> str:
        """What it is."""
        return (
            f"store {self.scheme} {self.dims} {self.dtype} {self.steps}, "
            f"{self.mean} mean{' and rotary mean' * self.rotary}"
        )

    def plan(self, arch: Arch) -> StorePlan:
        """Of the kernel that runs it."""
        scheme = SCHEMES[self.scheme]
        keys, values = (
            append_plan(
                part, dim, Dtype(self.dtype), centred=centred, aligned=True, few=True,
                grid=part.vector_size == 2 and part.entry_bits in CELLS and part.has_scale,
                rotary=rotary,
            )
            for part, dim, centred, rotary in (
                (scheme.key, self.dims[0], self.mean != NO, self.rotary),
                (scheme.value, self.dims[1], False, False),
            )
        )  # fmt: skip
        return store_plan(keys, values)

    def plans(self, arch: Arch) -> Sequence[StorePlan]:
        """See `Case`."""
        return (self.plan(arch),)

    def features(self, arch: Arch) -> Features:
        """See `Case`."""
        return {
            **must_run(self.plan(arch)),
            "scheme": self.scheme,
            "type": self.dtype,
            "steps": self.steps,
            "mean": self.mean,
            "rotary": self.rotary,
            "each dims": self.dims,
            "each dims by rotary": (self.dims, self.rotary),
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

        mean = None if self.mean == NO else torch.randn(*shape, 1, self.dims[0], device=device)
        measured = self.mean == MEASURED
        known = torch.zeros(shape, dtype=torch.bool, device=device) if measured else None
        cached = KVCacheView(
            side(scheme.key, self.dims[0], mean), side(scheme.value, self.dims[1], None),
            torch.zeros(ROWS_OF_BATCH, dtype=torch.int64, device=device),
            torch.zeros((), dtype=torch.int64, device=device), None, known, _CAPACITY, _WINDOW, 0,
            0,
        )  # fmt: skip
        new = [
            [2 * torch.randn(*shape, count, dim, device=device) + 1 for dim in self.dims]
            for count in self.steps
        ]
        if self.rotary:  # keys have one that two tokens tell
            turning = caches.turning(*shape, self.dims[0], device, 20.0)
            places = torch.arange(sum(self.steps), device=device).split(list(self.steps))
            for (keys, _), at in zip(new, places, strict=True):
                keys += turning.at(at)
            if measured:  # what was there before
                other = torch.randn_like(turning.mean)
                other[..., 2 * len(turning.inv_freq) :] = 0
                turning = turning._replace(mean=other)
            cached = turning.added_to(cached)
        return [tuple(part.to(dtype) for part in both) for both in new], cached

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
            static_reference.kv_append(keys, values, wanted)
            known = wanted.key_mean_known  # from the first token that is encoded on
            means = now if known is not None and bool(known.all()) else before
            last = length + keys.shape[2] - _WINDOW
            for at in range(max(length - _WINDOW, 0), max(min(last, _CAPACITY), 0)):
                for side, mean, turning, to in (
                    (wanted.key, means.key.mean, caches.turning_of(means), tapes.key),
                    (wanted.value, None, None, tapes.value),
                ):
                    row = side.recent[:, :, at % _SLOTS : at % _SLOTS + 1].contiguous()
                    append_keys(
                        row, mean, turning, to.codebook, to.codes, to.scale, 0, at, to.scheme
                    )
            length += keys.shape[2]
        right, is_, of_append = map(arguments_of, (wanted, now, tapes))
        floats = ("key_sinks", "value_sinks", "key_recent", "value_recent")
        for name in (*floats, "cache_seqlens", "key_mean_known"):
            both = right[name], is_[name]
            assert both == (None, None) or torch.equal(*both), f"{name} is wrong"
        _check_means(now, wanted, max(float(keys.abs().max()) for keys, _ in new))
        if self.mean != MEASURED:
            for name in ("key_mean", "key_rotary_mean"):
                was, is_now = arguments_of(before)[name], is_[name]
                assert was is is_now is None or torch.equal(was, is_now), f"{name} was written"
        for name in ("key_codes", "value_codes", "key_scale", "value_scale"):
            assert torch.equal(is_[name], of_append[name]), f"{name} not of append"


def _check_means(now: KVCacheView, wanted: KVCacheView, largest: float) -> None:
    """Means are those of the specification; a pair at the threshold may go either way.

    Args:
        largest: number of a key. cos and sin are wrong by 2^-20, so what turns by 2^-19 of it.
    """
    if now.key.mean is None or wanted.key.mean is None:
        return
    same = torch.ones_like(now.key.mean, dtype=torch.bool)
    if now.key_rotary_mean is not None and wanted.key_rotary_mean is not None:
        same = (now.key_rotary_mean != 0) == (wanted.key_rotary_mean != 0)
        assert float((~same).float().mean()) < 0.02, "other pairs turn"
        both = now.key_rotary_mean[same], wanted.key_rotary_mean[same]
        torch.testing.assert_close(*both, rtol=0, atol=2.0**-18 * largest)
    torch.testing.assert_close(now.key.mean[same], wanted.key.mean[same], rtol=1e-5, atol=1e-5)


def must_run(plan: StorePlan) -> dict[str, Hashable]:
    """What of a plan some problem must have: the kernel. A rotary mean changes what is done with
    keys, whatever values are."""
    if plan.keys.rotary:
        return {"each kernel of a rotary mean": kernel_of(plan.keys)}
    return {"each kernel": kernel_of(plan)}


def _copied(cached: KVCacheView) -> KVCacheView:
    """A copy, but for codebooks."""
    copy = cached.map(Tensor.clone)
    books = {"key_codebook": cached.key.codebook, "value_codebook": cached.value.codebook}
    return copy.replace(**books)


def cases(arch: Arch) -> list[StoreCase]:
    """Problems that meet every value of features, and every pair that occurs."""
    return list(_cases(arch))


@functools.cache
def _cases(arch: Arch) -> tuple[StoreCase, ...]:
    return tuple(covering(domain(arch), lambda case: case.features(arch)))


@functools.cache
def domain(arch: Arch) -> tuple[StoreCase, ...]:
    """Every scheme, size of heads, dtype and kind of mean, for steps of one and several tokens."""
    return tuple(_domain())


def _domain() -> Iterator[StoreCase]:
    dims = [*((dim, dim) for dim in HEAD_DIMS), (192, 128), (64, 96)]
    for both, (name, scheme) in itertools.product(dims, SCHEMES.items()):
        if appendable(scheme.key, both[0]) or appendable(scheme.value, both[1]):
            continue
        for steps, dtype, (mean, rotary) in itertools.product(STEPS, DTYPES, means(scheme)):
            yield StoreCase(name, both, dtype, steps, mean, rotary)


def means(scheme: KVScheme) -> list[tuple[str, bool]]:
    """Means that a static cache's keys may have, and whether a part of them turns: those that are
    given are calibrated."""
    measured = [(MEASURED, False), (MEASURED, True)] if scheme.centre_keys else [(NO, False)]
    return [*measured, (GIVEN, False), (GIVEN, True)]
