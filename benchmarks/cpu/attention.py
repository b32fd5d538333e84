"""Suite `cpu-attention`: one token's attention over a long KV cache on the CPU, in time per head.

    scores        q K^T only: coded keys against dense keys in float32 and bfloat16, lookups in
                  tables outside of registers (the PQ-Attention of NoMAD-Attention, figure 5), and
                  against reading the same number of bytes; the output is preallocated
    step          q K^T, softmax and the values. Baselines: PyTorch's operations one by one (bmm,
                  softmax, bmm: eager attention), its fused SDPA, onnxruntime's GroupQueryAttention
                  with an int8 cache if installed, and, with as many threads, reading the same bytes
                  and arithmetic alone. Rows `u4 rotary` are of keys with a rotary mean
                  (hf_vq/ops/rotary_mean.py) of every pair, against the same scheme without one
    prefill       the same for a chunk of a prompt after a cached one
    append        one token's keys and values into the cache, per vector
    append keys   keys only, against a copy into a dense cache and against the 256-entry search of
                  `cq-4`, which is that of PQ-Attention

Keys, values and codebooks are random: the speed of a kernel does not depend on them. Every call
finds its cache in main memory, and follows an untimed call of the same kind, as in generation.
`us_cached` is the compute time: few tokens, and more tokens whose codes stay in the L2 cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_vq.backends.cpu import library as native
from hf_vq.backends.cpu.kv import scores
from hf_vq.cache import LazyKV
from hf_vq.cache.codebooks import learned as is_learned
from hf_vq.cache.layer import LayerOptions, VQCacheLayer
from hf_vq.cache.prompt import Prompt
from hf_vq.formats.catalog import kv_scheme
from hf_vq.formats.scheme import VQScheme
from hf_vq.formats.tensors import kv_codebook_spec
from hf_vq.ops import KVCacheView, kv_append, kv_attention

from ..roofline.arithmetic import arithmetic
from ..roofline.cpu import reading
from ..timing import Candidate, cold_copies, extrapolated, interleave, speedup, summary

SCHEMES = ("u4", "u3", "u2", "nomad-u4")
PQ = "cq-4"  # 256 entries of 2 numbers: the codes of the paper's PQ-Attention
LEARNED = ("nomad-4", PQ)  # of these the keys are of interest; steps are not timed
ROTARY = "rotary"  # behind the name of a scheme
ROPE_THETA = 1e6  # of the models whose keys have the largest biases
CONTEXT = 16384
HEADS = 8  # key/value heads of a call
HEAD_DIM = 128
GROUPS = (1, 4)  # query heads per key/value head
CHUNKS = (32,)  # tokens of a prompt chunk
CHUNK_SCHEMES = ("u4", "nomad-u4", "nomad-4")
THREADS = (1, 2)
APPENDED = 64  # tokens of an append
UNTIMED = 1  # calls before one that is timed
IN_CACHE = (256, 1024)  # tokens whose codes stay in the second cache
LAYERS = 16  # of a model: all of them append in the same step


def run(
    *,
    schemes: Sequence[str] = SCHEMES,
    learned: Sequence[str] = LEARNED,
    context: int = CONTEXT,
    groups: Sequence[int] = GROUPS,
    chunks: Sequence[int] = CHUNKS,
    threads: Sequence[int] = THREADS,
    rounds: int = 20,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Time scores, whole steps and appending; `report` gets each row when it is known.

    Args:
        learned: schemes whose scores and appends are timed, but no steps.
        groups: query heads per key/value head of the steps; none = no steps.
        chunks: tokens of a prompt; none = no prefill.

    Returns:
        (settings, results) of the record.
    """
    every = (*schemes, *learned)

    def sections() -> Iterator[list[dict[str, Any]]]:
        yield _scores(every, context, rounds)
        for group in groups:
            yield _steps(schemes, context, group, 1, threads, rounds)
        for chunk in chunks:
            yield _steps(CHUNK_SCHEMES, context, 1, chunk, threads[:1], rounds)
        torch.set_num_threads(1)
        yield _appends(every, "kv", rounds)
        yield _appends(every, "k", rounds)

    found: list[dict[str, Any]] = []
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for section in sections():
            for row in section:
                found.append(row)
                report(row)
    finally:
        torch.set_num_threads(before)
    settings = {
        "context": context, "heads": HEADS, "head_dim": HEAD_DIM, "rounds": rounds,
        "isa": native.isa(),
    }  # fmt: skip
    return settings, {"rows": found}


def _layer(name: str) -> VQCacheLayer:
    """An empty layer of a cache that keeps floats of the newest update only."""
    scheme = kv_scheme(name)
    books = _codebook(scheme.key), _codebook(scheme.value)
    return VQCacheLayer(LayerOptions(scheme, sinks=0, window=0), Prompt(), 0, codebooks=books)


def _codebook(scheme: VQScheme) -> Tensor | None:
    """Codebooks fp16 [heads, groups of channels, entries, x] of a learned scheme, else None."""
    if not is_learned(scheme):
        return None
    entries = torch.randn(kv_codebook_spec(scheme, HEADS, HEAD_DIM, "the layer").shape).half()
    return entries.sort(2).values if scheme.vector_size == 1 else entries  # as k-means leaves them


def _cached(name: str, context: int, fresh: int = 1) -> KVCacheView:
    """A cache of `context` tokens as codes, and `fresh` newer ones."""
    layer = _layer(name)
    layer.update(*torch.randn(2, 1, HEADS, context, HEAD_DIM).unbind())
    tokens = torch.randn(1, HEADS, fresh, HEAD_DIM)
    handle = layer.update(tokens, tokens)[0]
    assert isinstance(handle, LazyKV)
    return handle.update.view


def _turning(caches: list[KVCacheView]) -> list[KVCacheView]:
    """The same caches, whose keys have a rotary mean of every pair."""
    inv_freq = (ROPE_THETA ** -(torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)).float()
    mean = torch.randn(1, HEADS, 1, HEAD_DIM)
    return [c.replace(key_rotary_mean=mean, rotary_inv_freq=inv_freq) for c in caches]


def _coded_bytes(cached: KVCacheView, sides: str) -> int:
    coded = {"k": cached.key[:2], "v": cached.value[:2]}  # codes and scales
    return sum(tensor.nbytes for side in sides for tensor in coded[side])


def _cold(cached: KVCacheView, nbytes: int) -> list[KVCacheView]:
    """Copy a KV cache so often that no call finds its data in the processor's caches.

    A call reads `nbytes` bytes of one copy."""

    def copy(codes: Tensor) -> Tensor:
        return native.allocate(tuple(codes.shape)).copy_(codes)

    copies = (
        cached.replace(
            key_codes=copy(cached.key.codes), key_scale=cached.key.scale.clone(),
            value_codes=copy(cached.value.codes), value_scale=cached.value.scale.clone(),
        )
        for _ in range(cold_copies(nbytes) - 1)
    )  # fmt: skip
    return [cached, *copies]


@torch.inference_mode()
def _scores(schemes: Sequence[str], context: int, rounds: int) -> list[dict[str, Any]]:
    library = native.load()
    candidates: dict[str, Candidate] = {}
    nbytes = {}
    for name in schemes:
        cached = _cached(name, context)
        nbytes[name] = _coded_bytes(cached, "k")
        candidates[name] = _scoring(_cold(cached, nbytes[name]))
        candidates |= _in_cache(name, 1, _scoring)
    size = max(nbytes.values())
    read = reading(size)
    if library is not None and read is not None:
        candidates["read"] = read
        candidates["dense bf16"] = _dense_scores(library, context, torch.bfloat16)
        candidates["dense fp32"] = _dense_scores(library, context, torch.float32)
        candidates["PQ fp32 tables"] = _table_scores(library, context)
    candidates.update(_torch_scores(context))
    seconds = interleave(candidates, rounds, untimed=UNTIMED)
    found = []
    shown = _without_cached(seconds)
    for name, times in shown.items():
        per_head = [time / HEADS for time in times]
        row: dict[str, Any] = {"what": "scores", "name": name, "threads": 1, **summary(per_head)}
        if name in nbytes:
            row["speedup"] = {
                peer: speedup(times, seconds[peer])
                for peer in shown if peer != "read" and peer not in nbytes
            }  # fmt: skip
            row |= _of_bandwidth(times, seconds, nbytes[name] / size)
            row["us_cached"] = _us_cached(seconds, name, context)
        found.append(row)
    return found


def _of_bandwidth(
    times: list[float], seconds: dict[str, list[float]], share: float
) -> dict[str, float]:
    """Fraction of our time that reading takes; the baseline reads 1 / `share` times our bytes."""
    return {"of_bandwidth": speedup(times, seconds["read"]) * share} if "read" in seconds else {}


def _in_cache(
    name: str, fresh: int, calling: Callable[[list[KVCacheView]], Candidate]
) -> dict[str, Candidate]:
    """`calling` with caches of few tokens, for `_us_cached`."""
    return {
        f"{name} cached {tokens}": replace(calling([_cached(name, tokens, fresh)]), calls=16)
        for tokens in IN_CACHE
    }


def _us_cached(seconds: Mapping[str, list[float]], name: str, context: int) -> float:
    """Microseconds a head that computing takes with `context` tokens, if reading took no time."""
    few, more = ((f"{name} cached {tokens}", tokens) for tokens in IN_CACHE)
    return extrapolated(seconds, few, more, context) / HEADS * 1e6


def _without_cached(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: times for name, times in seconds.items() if " cached " not in name}


def _scoring(caches: list[KVCacheView]) -> Candidate:
    query = torch.randn(1, HEADS, 1, HEAD_DIM)
    out = torch.empty(1, HEADS, 1, caches[0].num_coded)
    return Candidate(lambda i: scores(query, caches[i], score=out), len(caches))


def _dense_scores(library: ctypes.CDLL, context: int, dtype: torch.dtype) -> Candidate:
    """Our own loop over dense keys, one head after the other, on huge pages as the codes are."""
    shape = (HEADS, context, HEAD_DIM)
    nbytes = HEADS * context * HEAD_DIM * dtype.itemsize
    copies = [
        native.allocate((nbytes,)).view(dtype).view(shape) for _ in range(cold_copies(nbytes))
    ]
    copies = [copy.copy_(torch.randn(shape)) for copy in copies]
    query, out = torch.randn(HEADS, HEAD_DIM), torch.empty(HEADS, context)

    def call(i: int) -> None:
        for head in range(HEADS):
            library.hf_vq_dense_scores(
                copies[i][head].data_ptr(), native.DTYPES[dtype], query[head].data_ptr(),
                context, HEAD_DIM, out[head].data_ptr(),
            )  # fmt: skip

    return Candidate(call, len(copies))


def _table_scores(library: ctypes.CDLL, context: int) -> Candidate:
    """PQ-Attention: float32 tables of each query, made in the call, and a load for each code."""
    scheme = kv_scheme(PQ).key
    size, codebook = scheme.vector_size, _codebook(scheme)
    assert codebook is not None
    shape = (HEADS, context, HEAD_DIM // size)
    nbytes = HEADS * context * HEAD_DIM // size
    copies = [native.allocate(shape).random_(0, 256) for _ in range(cold_copies(nbytes))]
    query, out = torch.randn(HEADS, HEAD_DIM), torch.empty(HEADS, context)

    def call(i: int) -> None:
        for head in range(HEADS):
            library.hf_vq_table_scores(
                copies[i][head].data_ptr(), codebook[head].data_ptr(), size, query[head].data_ptr(),
                context, HEAD_DIM, out[head].data_ptr(),
            )  # fmt: skip

    return Candidate(call, len(copies))


def _torch_scores(context: int) -> dict[str, Candidate]:
    keys = _dense(context, torch.float32)
    query = torch.randn(HEADS, HEAD_DIM, 1)
    return {
        "torch K q": Candidate(lambda i: torch.bmm(keys[i], query), len(keys)),
        "torch q K^T": Candidate(lambda i: torch.bmm(query.mT, keys[i].mT), len(keys)),
    }


def _dense(context: int, dtype: torch.dtype) -> list[Tensor]:
    shape = (HEADS, context, HEAD_DIM)
    copies = cold_copies(HEADS * context * HEAD_DIM * dtype.itemsize)
    first = torch.randn(shape).to(dtype)
    return [first, *(first.clone() for _ in range(copies - 1))]


@torch.inference_mode()
def _steps(
    schemes: Sequence[str],
    context: int,
    group: int,
    queries: int,
    threads: Sequence[int],
    rounds: int,
) -> list[dict[str, Any]]:
    """Steps of one query, or of the `queries` tokens of a chunk."""
    ours: dict[str, Candidate] = {}
    in_cache: dict[str, Candidate] = {}
    nbytes = {}
    for name in schemes:
        cached = _cached(name, context, queries)
        nbytes[name] = nbytes[f"{name} {ROTARY}"] = _coded_bytes(cached, "kv")
        copies = _cold(cached, nbytes[name])
        ours[name] = _stepping(copies, group, queries)
        ours[f"{name} {ROTARY}"] = _stepping(_turning(copies), group, queries)
        in_cache |= _in_cache(name, queries, lambda caches: _stepping(caches, group, queries))
        turning = _in_cache(
            name, queries, lambda caches: _stepping(_turning(caches), group, queries)
        )
        in_cache |= {
            key.replace(name, f"{name} {ROTARY}", 1): call for key, call in turning.items()
        }
    size = max(nbytes.values())
    read = reading(size)
    floor = {"arithmetic": arithmetic()} | ({} if read is None else {"read": read})
    peers = _torch_steps(context, group * queries)
    if queries == 1 and (gqa := _onnxruntime_step(context, group)) is not None:
        peers["onnxruntime int8"] = gqa
    found = []
    single: dict[str, float] = {}
    for count in threads:
        torch.set_num_threads(count)
        # Only the first run is compared with the peers: they are slow.
        others = {**peers, **in_cache} if count == threads[0] else {}
        seconds = interleave({**ours, **floor, **others}, rounds, untimed=UNTIMED)
        for name, times in _without_cached(seconds).items():
            per_head = [time / HEADS for time in times]
            row: dict[str, Any] = {
                "what": "step" if queries == 1 else "prefill", "name": name, "threads": count,
                "group": group, "queries": queries, **summary(per_head),
            }  # fmt: skip
            if name in ours:
                row |= _of_bandwidth(times, seconds, nbytes[name] / size)
            if count == threads[0]:
                single[name] = row["us"]
                if name in ours:
                    row["speedup"] = {peer: speedup(times, seconds[peer]) for peer in peers}
                    if name.endswith(ROTARY):
                        plain = name.removesuffix(f" {ROTARY}")
                        row["speedup"][plain] = speedup(times, seconds[plain])
                    row["us_cached"] = _us_cached(seconds, name, context)
            elif name not in peers:
                row["scaling"] = single[name] / row["us"]
            found.append(row)
    return found


def _stepping(caches: list[KVCacheView], group: int, queries: int) -> Candidate:
    query = torch.randn(1, HEADS * group, queries, HEAD_DIM)
    scaling = HEAD_DIM**-0.5
    return Candidate(lambda i: kv_attention(query, caches[i], softmax_scale=scaling), len(caches))


def _torch_steps(context: int, rows: int) -> dict[str, Candidate]:
    """`rows` queries of each key/value head: of a group, or of a chunk whose mask hides little."""
    found = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        keys, values = _dense(context, dtype), _dense(context, dtype)
        query = torch.randn(HEADS, rows, HEAD_DIM).to(dtype)
        found[f"torch bmm {name}"] = _composed(query, keys, values)
        found[f"torch SDPA {name}"] = _fused(query, keys, values)
    return found


def _composed(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Candidate:
    scaling = HEAD_DIM**-0.5

    def call(i: int) -> Tensor:
        # K q is several times as fast as q K^T for one query; the better of the two is compared.
        logits = torch.bmm(keys[i], query.mT).mT * scaling
        return torch.bmm(logits.softmax(-1), values[i])

    return Candidate(call, len(keys))


def _fused(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Candidate:
    def call(i: int) -> Tensor:
        # [1, heads, rows, D] over [1, heads, T, D]: a group's heads are as good as queries.
        return torch.nn.functional.scaled_dot_product_attention(
            query[None], keys[i][None], values[i][None]
        )

    return Candidate(call, len(keys))


def _onnxruntime_step(context: int, group: int) -> Candidate | None:
    try:
        from ..peers import onnx_runtime
    except ImportError:
        return None
    return onnx_runtime.step(context, HEADS, group, HEAD_DIM)


@torch.no_grad()  # a cache would not keep tensors of inference_mode
def _appends(schemes: Sequence[str], sides: str, rounds: int) -> list[dict[str, Any]]:
    """Appending keys and values ("kv"), or keys alone ("k"), which have peers."""
    candidates = {name: _appending(_layer(name), sides) for name in schemes}
    peers = []
    if sides == "k":
        candidates["dense fp32"] = _copying()
        peers = [name for name in (PQ, "dense fp32") if name in candidates]
    seconds = interleave(candidates, rounds)
    vectors = len(sides) * HEADS * APPENDED
    found = []
    for name, times in seconds.items():
        row: dict[str, Any] = {
            "what": "append keys" if sides == "k" else "append", "name": name, "threads": 1,
            **summary([time / vectors for time in times]),
        }  # fmt: skip
        if name in schemes and peers:
            row["speedup"] = {peer: speedup(times, seconds[peer]) for peer in peers if peer != name}
        found.append(row)
    return found


def _appending(layer: VQCacheLayer, sides: str) -> Candidate:
    tokens = torch.randn(1, HEADS, APPENDED, HEAD_DIM)
    layer.update(tokens, tokens)
    stores = [getattr(layer, side) for side in sides]
    values = tokens if "v" in sides else tokens[:, :, :0]

    def call(i: int) -> None:
        for store in stores:
            store.codes.reserve(APPENDED)
        kv_append(tokens, values, layer._view(tokens, tokens, 0, APPENDED, leaving=APPENDED))
        for store in stores:
            store.codes.end += APPENDED

    return Candidate(call, calls=LAYERS)


def _copying() -> Candidate:
    """Copy of keys to the next position of a dense float32 cache."""
    tokens = torch.randn(1, HEADS, APPENDED, HEAD_DIM)
    places = cold_copies(tokens.nbytes)
    cache = torch.randn(1, HEADS, places * APPENDED, HEAD_DIM)
    return Candidate(
        lambda i: cache.narrow(2, i * APPENDED, APPENDED).copy_(tokens), places, LAYERS
    )
