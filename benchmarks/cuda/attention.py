"""Suite `cuda-attention`: one step of attention over a quantized KV cache on a GPU.

    decode   attention of one token, against the fastest attention of PyTorch over a cache in
             bfloat16 (cuDNN, flash, memory-efficient and math are tried)
    rotary   the same with a rotary mean of the keys: of all pairs of channels, of 16 in each head,
             and of none; against none. Also of both steps: append of a token, then attention
    store    append of one token to a static cache, against the copies of `StaticCache`
    memory   bytes that the allocator gives per token

Caches are made by `VQCache`: sinks and a window of floats, then codes. Calls run in CUDA graphs,
with a cold L2 cache.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_vq import dispatch
from hf_vq.cache.static_layer import VQStaticLayer
from hf_vq.errors import VQBackendError
from hf_vq.ops import KVCacheView, kv_append, kv_attention
from hf_vq.ops.kv import STATIC
from hf_vq.ops.library import attention_problem

from ..peers import sdpa
from ..random_kv import HEAD_DIM, SINKS, WINDOW, bytes_read, coded_cache, copy_of, layer_arguments
from ..timing import Candidate, speedup, summary
from .timing import cold_copies, interleave_graphs

SCHEMES = ("u4", "u3", "u2", "k4v2", "cq-4", "cq-2", "nomad-u4", "qserve-kv4")
_OF_A_PRODUCT = 16  # pairs: as many as turn in most layers that turn
TURNING = {
    "rotary mean": HEAD_DIM // 2, f"rotary mean of {_OF_A_PRODUCT} pairs": _OF_A_PRODUCT,
    "rotary mean of zeros": 0,
}  # pairs that turn  # fmt: skip
TURNING_SCHEMES = ("u4", "u3", "u2")
MEMORY = 4.6e12  # bytes that an H200 reads in a second, at best
_COPIES = 64  # at most: short caches then lie in L2, for all candidates alike
_COMPILING = 16  # kernels compiled in parallel
_CAPACITY = 1024  # tokens of a cache that is stored to
_LAYERS = 32  # whose caches a round of `store` writes to
_REFERENCE = "reference"  # the row that is no kernel; it is not timed
_DTYPE = torch.bfloat16


class Case(NamedTuple):
    """Query heads, key/value heads, rows, and tokens that are attended to."""

    heads: int
    kv_heads: int
    batch: int
    context: int


LONG = (
    *(Case(32, 32, 1, context) for context in (4096, 16384, 65536)),
    Case(32, 32, 8, 16384),
    *(Case(32, 8, 1, context) for context in (4096, 16384, 65536)),
    *(Case(32, 8, 8, context) for context in (16384, 65536)),
    Case(32, 4, 8, 16384),
)
SHORT = tuple(
    Case(32, kv_heads, 1, context)
    for kv_heads in (32, 8)
    for context in (1, 16, 64, 128, 256, 512, 1024, 2048)
)
QUICK = (Case(32, 8, 1, 1), Case(32, 8, 1, 256), Case(32, 8, 2, 2048))


def run(
    *,
    schemes: Sequence[str] = SCHEMES,
    rounds: int = 5,
    quick: bool = False,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Time every scheme in every case; `report` gets each row when it is known.

    Args:
        quick: three small cases instead of all.

    Returns:
        (settings, results) of the record.

    Raises:
        VQBackendError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise VQBackendError("the suite cuda-attention needs a CUDA device.")
    cases = QUICK if quick else (*LONG, *SHORT)
    stores = dict.fromkeys((case.kv_heads, case.batch) for case in cases)

    def sections() -> Iterator[list[dict[str, Any]]]:
        for case in cases:
            yield _decode_rows(schemes, case, rounds)
            gc.collect()
            torch.cuda.empty_cache()
        for kv_heads, batch in stores:
            yield _store_rows(schemes, kv_heads, batch, rounds)
        yield _memory_rows(schemes)

    found: list[dict[str, Any]] = []
    with torch.no_grad():
        for row in chain.from_iterable(sections()):
            found.append(row)
            report(row)
    settings = {
        "rounds": rounds, "dtype": str(_DTYPE)[6:], "head_dim": HEAD_DIM, "sinks": SINKS,
        "window": WINDOW, "memory_bytes_per_second": MEMORY,
    }  # fmt: skip
    return settings, {"rows": found}


def _decode_rows(schemes: Sequence[str], case: Case, rounds: int) -> list[dict[str, Any]]:
    query = torch.randn(case.batch, case.heads, 1, HEAD_DIM, dtype=_DTYPE, device="cuda")
    peers = sdpa.fastest(*case, HEAD_DIM, _DTYPE, _COPIES)
    candidates = {f"bf16 {name}": candidate for name, candidate in peers.items()}
    nbytes = dict.fromkeys(
        candidates, 2 * case.batch * case.kv_heads * case.context * HEAD_DIM * _DTYPE.itemsize
    )
    kernels: dict[str, str] = {}
    turning: dict[str, Candidate] = {}  # by name of a scheme, a space, and the mean
    steps: dict[str, Candidate] = {}  # the same with append; a name alone: without a mean
    for name in schemes:
        cached = coded_cache(name, *case[1:], _DTYPE)
        kernels[name], nbytes[name] = _kernel(query, cached), bytes_read(cached)
        if kernels[name] != _REFERENCE:
            candidates[name] = _attending(query, cached, nbytes[name])
            views = dict(_turning(name, query, cached))
            if views:
                steps[name] = _attending(query, cached, nbytes[name], append=True)
            for mean, view in views.items():
                turning[f"{name} {mean}"] = _attending(query, view, nbytes[name])
                steps[f"{name} {mean}"] = _attending(query, view, nbytes[name], append=True)
    ours = [candidates[name] for name in kernels if name in candidates]
    _compile([*ours, *turning.values(), *steps.values()])
    every = interleave_graphs(candidates | turning, rounds)
    with_append = interleave_graphs(steps, rounds)
    seconds = {name: every[name] for name in candidates}
    best = min((name for name in seconds if name not in kernels), key=lambda n: median(seconds[n]))
    found = []
    for name in (*seconds, *(name for name in kernels if name not in seconds)):
        row: dict[str, Any] = {"what": "decode", "name": name, **case._asdict()}
        if name in seconds:
            row |= summary(seconds[name])
            row["of_memory"] = nbytes[name] / MEMORY / (row["us"] * 1e-6)
        if name in kernels:
            row["kernel"] = kernels[name]
            if name in seconds:
                row |= {"peer": best, "speedup": speedup(seconds[name], seconds[best])}
        found.append(row)
    for both, times in every.items():
        if both not in turning:
            continue
        name, _, mean = both.partition(" ")
        row = {"what": "rotary", "name": name, "mean": mean, **case._asdict()}
        row |= summary(times) | {"of_plain": speedup(seconds[name], times)}
        found.append({**row, "step_of_plain": speedup(with_append[name], with_append[both])})
    return found


def _turning(name: str, query: Tensor, cached: KVCacheView) -> Iterator[tuple[str, KVCacheView]]:
    """The cache with each rotary mean, where a kernel adds it and tokens have codes."""
    if name not in TURNING_SCHEMES or cached.num_coded <= SINKS:
        return
    inv_freq = 10_000.0 ** -(torch.arange(HEAD_DIM // 2, device="cuda") / (HEAD_DIM // 2))
    some = 30 * torch.randn(*cached.key.recent.shape[:2], 1, HEAD_DIM, device="cuda")
    strength = torch.rand(*cached.key.recent.shape[:2], 1, HEAD_DIM // 2, device="cuda")
    rank = strength.argsort(-1).argsort(-1).repeat(1, 1, 1, 2)
    for mean, pairs in TURNING.items():
        turning = cached._replace(key_rotary_mean=some * (rank < pairs), rotary_inv_freq=inv_freq)
        if _kernel(query, turning) == _kernel(query, cached):
            yield mean, turning


def _kernel(query: Tensor, cached: KVCacheView) -> str:
    """The entry of the dispatch table that runs."""
    problem = attention_problem(
        query.device, query.dtype, cached.key.scheme, cached.value.scheme, HEAD_DIM, HEAD_DIM,
        1, cached.max_seqlen, cached.key.layout, cached.value.layout,
        rotary=cached.key_rotary_mean is not None,
    )  # fmt: skip
    return dispatch.select(problem).name


def _attending(query: Tensor, cached: KVCacheView, nbytes: int, append: bool = False) -> Candidate:
    """`append`: first, the newest of the tokens that have codes is encoded."""
    copies = min(cold_copies(nbytes), _COPIES)
    caches = [cached, *(copy_of(cached) for _ in range(copies - 1))]
    shape = *cached.key.recent.shape[:2], 1, HEAD_DIM
    keys, values = torch.randn(2, *shape, dtype=_DTYPE, device="cuda").unbind()

    def call(i: int) -> None:
        if append:
            kv_append(keys, values, caches[i])
        kv_attention(query, caches[i], softmax_scale=HEAD_DIM**-0.5)

    return Candidate(call, copies)


def _compile(candidates: Iterable[Candidate]) -> None:
    """Let candidates find their kernels, side by side: compilers take seconds."""

    def first(candidate: Candidate) -> None:
        with torch.no_grad():  # a setting of the thread
            candidate.call(0)

    with ThreadPoolExecutor(_COMPILING) as pool:
        list(pool.map(first, candidates))
    torch.cuda.synchronize()


def _store_rows(
    schemes: Sequence[str], kv_heads: int, batch: int, rounds: int
) -> list[dict[str, Any]]:
    """One token's keys and values of each row, to the caches of a model's layers in turn."""
    shape = batch, kv_heads, 1, HEAD_DIM
    keys, values = torch.randn(2, *shape, dtype=_DTYPE, device="cuda").unbind()
    candidates = {"bf16": _copying(keys, values)}
    kernels = {}
    for name in schemes:
        layer = VQStaticLayer(*layer_arguments(name, kv_heads, limit=_CAPACITY))
        prompt = torch.randn(2, batch, kv_heads, 2 * WINDOW, HEAD_DIM, dtype=_DTYPE, device="cuda")
        layer.update(*prompt.unbind())
        problem = dispatch.KVAppendProblem(
            "cuda", str(_DTYPE)[6:], layer.k.spec, layer.v.spec,
            1, HEAD_DIM, HEAD_DIM, "rows", "rows", STATIC,
        )  # fmt: skip
        kernels[name] = dispatch.select(problem).name
        if kernels[name] != _REFERENCE:
            candidates[name] = _storing(layer.static, keys, values)
    _compile(candidates.values())
    seconds = interleave_graphs(candidates, rounds)
    found = []
    for name, times in seconds.items():
        row: dict[str, Any] = {
            "what": "store", "name": name, "kv_heads": kv_heads, "batch": batch, **summary(times)
        }  # fmt: skip
        if name in kernels:
            row |= {"kernel": kernels[name], "speedup": speedup(times, seconds["bf16"])}
        found.append(row)
    return found


def _copying(keys: Tensor, values: Tensor) -> Candidate:
    batch, kv_heads, _, dim = keys.shape
    shape = batch, kv_heads, _CAPACITY, dim
    caches = [keys.new_zeros(2, *shape).unbind() for _ in range(_LAYERS)]
    position = torch.zeros(1, dtype=torch.int64, device="cuda")

    def call(i: int) -> None:
        for cache, tokens in zip(caches[i], (keys, values), strict=True):
            cache.index_copy_(2, position, tokens)

    return Candidate(call, _LAYERS)


def _storing(cached: KVCacheView, keys: Tensor, values: Tensor) -> Candidate:
    caches = [copy_of(cached) for _ in range(_LAYERS)]
    return Candidate(lambda i: kv_append(keys, values, caches[i]), _LAYERS)


def _memory_rows(schemes: Sequence[str]) -> list[dict[str, Any]]:
    """Bytes of the allocator for each coded token of a key/value head, of keys and of values."""
    few, many = 1 << 14, 1 << 16
    dense = 2 * HEAD_DIM * _DTYPE.itemsize
    found = []
    for name in schemes:
        sizes = [_allocated(name, tokens) for tokens in (few, many)]
        nbytes = (sizes[1] - sizes[0]) / (many - few)
        found.append({"what": "memory", "name": name, "bytes_per_token": nbytes,
                      "smaller": dense / nbytes})  # fmt: skip
    return found


def _allocated(name: str, tokens: int) -> int:
    """Bytes that a layer of one head allocates, codes for so many tokens among them."""
    gc.collect()
    torch.cuda.empty_cache()  # memory of earlier tensors may be handed out in blocks too large
    before = torch.cuda.memory_allocated()
    layer = VQStaticLayer(*layer_arguments(name, 1, limit=tokens))
    layer.update(*torch.randn(2, 1, 1, 2 * WINDOW, HEAD_DIM, dtype=_DTYPE, device="cuda").unbind())
    return torch.cuda.memory_allocated() - before
