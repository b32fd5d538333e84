"""Suite `cpu-attention`: one token's attention over a long KV cache on the CPU, in time per head.

    scores    q K^T alone: the coded keys against dense ones in float32 and bfloat16, and against
              the time that this processor needs to read as many bytes once
    step      q K^T, softmax and the values: against PyTorch's operations one by one (bmm, softmax,
              bmm: what eager attention does), against its fused SDPA, and against onnxruntime's
              GroupQueryAttention with an int8 cache where that package is installed
    append    one token's keys and values into the cache, per vector

Keys and values are random: how fast a kernel is does not depend on them. Every call finds its cache
in main memory, as it does when a model generates.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends import native
from ..backends.cpu_attention import scores
from ..cache.handle import VQHandle
from ..cache.layer import LayerOptions, VQCacheLayer
from ..cache.prompt import Prompt
from ..formats.catalog import kv_scheme
from ..ops.attention import CachedKV, attention
from .timing import Contestant, cold_copies, interleave, speedup, summary

SCHEMES = ("u4", "u3", "u2", "nomad-u4")
CONTEXT = 16384
HEADS = 8  # key/value heads of a call
HEAD_DIM = 128
GROUPS = (1, 4)  # query heads per key/value head
THREADS = (1, 2)


def run(
    *,
    schemes: Sequence[str] = SCHEMES,
    context: int = CONTEXT,
    groups: Sequence[int] = GROUPS,
    threads: Sequence[int] = THREADS,
    rounds: int = 20,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Time scores, whole steps and appending; `report` gets each row when it is known.

    Returns:
        (settings, results) of the record.
    """
    found: list[dict[str, Any]] = []
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for row in _scores(schemes, context, rounds):
            found.append(row)
            report(row)
        for group in groups:
            for row in _steps(schemes, context, group, threads, rounds):
                found.append(row)
                report(row)
        torch.set_num_threads(1)
        for row in _appends(schemes, rounds):
            found.append(row)
            report(row)
    finally:
        torch.set_num_threads(before)
    settings = {
        "context": context, "heads": HEADS, "head_dim": HEAD_DIM, "rounds": rounds,
        "isa": native.isa(),
    }  # fmt: skip
    return settings, {"rows": found}


def _caches(name: str, context: int, copies: int, dtype: torch.dtype) -> list[CachedKV]:
    """The same tokens in as many caches: all but one token are codes."""
    options = LayerOptions(kv_scheme(name), sinks=0, window=0)
    shape = (1, HEADS, context, HEAD_DIM)
    keys, values = (torch.randn(shape).to(dtype) for _ in range(2))
    token = torch.randn(1, HEADS, 1, HEAD_DIM).to(dtype)
    found = []
    for _ in range(copies):
        layer = VQCacheLayer(options, Prompt(), 0)
        layer.update(keys, values)
        handle = layer.update(token, token)[0]
        assert isinstance(handle, VQHandle)
        found.append(handle.update.cached)
    return found


def _coded_bytes(cached: CachedKV, side: str) -> int:
    codes, scale = (
        (cached.k_codes, cached.k_scale) if side == "k" else (cached.v_codes, cached.v_scale)
    )
    return codes.nbytes + scale.nbytes


@torch.inference_mode()
def _scores(schemes: Sequence[str], context: int, rounds: int) -> list[dict[str, Any]]:
    library = native.load()
    contestants: dict[str, Contestant] = {}
    nbytes = {}
    for name in schemes:
        caches = _caches(name, context, 1, torch.float32)
        nbytes[name] = _coded_bytes(caches[0], "k")
        caches += _caches(name, context, cold_copies(nbytes[name]) - 1, torch.float32)
        contestants[name] = _scoring(caches)
    size = max(nbytes.values())
    if library is not None:
        memory = [native.allocate((size,)) for _ in range(cold_copies(size))]
        contestants["read"] = Contestant(
            lambda i: library.hf_vq_read_memory(memory[i].data_ptr(), size), len(memory)
        )
        contestants["dense bf16"] = _dense_scores(library, context, torch.bfloat16)
        contestants["dense fp32"] = _dense_scores(library, context, torch.float32)
    contestants.update(_torch_scores(context))
    seconds = interleave(contestants, rounds)
    found = []
    for name, times in seconds.items():
        per_head = [time / HEADS for time in times]
        row: dict[str, Any] = {"what": "scores", "name": name, "threads": 1, **summary(per_head)}
        if name in nbytes:
            row["speedup"] = {
                peer: speedup(times, seconds[peer]) for peer in contestants if peer not in nbytes
            }
            if "read" in seconds:
                # The yardstick read as many bytes as the largest scheme has.
                row["of_bandwidth"] = row["speedup"].pop("read") * nbytes[name] / size
        found.append(row)
    return found


def _scoring(caches: list[CachedKV]) -> Contestant:
    query = torch.randn(1, HEADS, 1, HEAD_DIM)
    return Contestant(lambda i: scores(query, caches[i]), len(caches))


def _dense_scores(library: ctypes.CDLL, context: int, dtype: torch.dtype) -> Contestant:
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

    return Contestant(call, len(copies))


def _torch_scores(context: int) -> dict[str, Contestant]:
    keys = _dense(context, torch.float32)
    query = torch.randn(HEADS, HEAD_DIM, 1)
    return {
        "torch K q": Contestant(lambda i: torch.bmm(keys[i], query), len(keys)),
        "torch q K^T": Contestant(lambda i: torch.bmm(query.mT, keys[i].mT), len(keys)),
    }


def _dense(context: int, dtype: torch.dtype) -> list[Tensor]:
    shape = (HEADS, context, HEAD_DIM)
    copies = cold_copies(HEADS * context * HEAD_DIM * dtype.itemsize)
    first = torch.randn(shape).to(dtype)
    return [first, *(first.clone() for _ in range(copies - 1))]


@torch.inference_mode()
def _steps(
    schemes: Sequence[str], context: int, group: int, threads: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    ours: dict[str, Contestant] = {}
    for name in schemes:
        (first,) = _caches(name, context, 1, torch.float32)
        nbytes = _coded_bytes(first, "k") + _coded_bytes(first, "v")
        caches = [first, *_caches(name, context, cold_copies(nbytes) - 1, torch.float32)]
        ours[name] = _stepping(caches, group)
    peers = _torch_steps(context, group)
    if (gqa := _onnxruntime_step(context, group)) is not None:
        peers["onnxruntime int8"] = gqa
    found = []
    single: dict[str, float] = {}
    for count in threads:
        torch.set_num_threads(count)
        # Only the first run is compared with the peers: they are slow.
        seconds = interleave({**ours, **(peers if count == threads[0] else {})}, rounds)
        for name, times in seconds.items():
            per_head = [time / HEADS for time in times]
            row: dict[str, Any] = {
                "what": "step", "name": name, "threads": count, "group": group,
                **summary(per_head),
            }  # fmt: skip
            if count == threads[0]:
                single[name] = row["us"]
                if name in ours:
                    row["speedup"] = {peer: speedup(times, seconds[peer]) for peer in peers}
            elif name in ours:
                row["scaling"] = single[name] / row["us"]
            found.append(row)
    return found


def _stepping(caches: list[CachedKV], group: int) -> Contestant:
    query = torch.randn(1, HEADS * group, 1, HEAD_DIM)
    scaling = HEAD_DIM**-0.5
    return Contestant(lambda i: attention(query, caches[i], scaling=scaling), len(caches))


def _torch_steps(context: int, group: int) -> dict[str, Contestant]:
    found = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        keys, values = _dense(context, dtype), _dense(context, dtype)
        query = torch.randn(HEADS, group, HEAD_DIM).to(dtype)
        found[f"torch bmm {name}"] = _composed(query, keys, values)
        found[f"torch SDPA {name}"] = _fused(query, keys, values)
    return found


def _composed(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Contestant:
    scaling = HEAD_DIM**-0.5

    def call(i: int) -> Tensor:
        # K q is several times as fast as q K^T for one query; the better of the two is compared.
        logits = torch.bmm(keys[i], query.mT).mT * scaling
        return torch.bmm(logits.softmax(-1), values[i])

    return Contestant(call, len(keys))


def _fused(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Contestant:
    def call(i: int) -> Tensor:
        # [1, heads, group, D] over [1, heads, T, D]: the group's heads are as good as queries.
        return torch.nn.functional.scaled_dot_product_attention(
            query[None], keys[i][None], values[i][None]
        )

    return Contestant(call, len(keys))


def _onnxruntime_step(context: int, group: int) -> Contestant | None:
    try:
        from . import onnxruntime_peer
    except ImportError:
        return None
    return onnxruntime_peer.step(context, HEADS, group, HEAD_DIM)


@torch.inference_mode()
def _appends(schemes: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    contestants = {}
    for name in schemes:
        layer = VQCacheLayer(LayerOptions(kv_scheme(name), sinks=0, window=0), Prompt(), 0)
        tokens = torch.randn(1, HEADS, 256, HEAD_DIM)
        layer.update(tokens, tokens)
        contestants[name] = _appending(layer)
    seconds = interleave(contestants, rounds)
    vectors = 2 * HEADS * 64
    return [
        {
            "what": "append", "name": name, "threads": 1,
            **summary([time / vectors for time in times]),
        }
        for name, times in seconds.items()
    ]  # fmt: skip


def _appending(layer: VQCacheLayer) -> Contestant:
    tokens = torch.randn(1, HEADS, 64, HEAD_DIM)

    def call(i: int) -> None:
        layer.k.encode(tokens)
        layer.v.encode(tokens)

    return Contestant(call)
