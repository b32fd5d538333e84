"""Coded caches of random tokens, as `VQCache` makes them, of any length at once.

How fast a kernel is does not depend on the numbers, but it may on how codes are distributed: so
some tokens are really encoded, and a longer cache repeats their codes.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from hf_vq.cache.codebooks import learned
from hf_vq.cache.layer import LayerOptions, VQCacheLayer
from hf_vq.cache.lazy_kv import VQHandle
from hf_vq.cache.prompt import Prompt
from hf_vq.formats.catalog import kv_scheme
from hf_vq.formats.scheme import VQScheme
from hf_vq.formats.tensors import kv_codebook_spec
from hf_vq.ops.attention import CachedKV
from hf_vq.ops.library import parse
from hf_vq.ops.static import StaticKV

Cached = TypeVar("Cached", CachedKV, StaticKV)
SINKS, WINDOW = 4, 64  # the defaults of VQCache
HEAD_DIM = 128
_ENCODED = 1024  # tokens that are really encoded


def layer_arguments(
    name: str,
    kv_heads: int,
    device: str = "cuda",
    *,
    sinks: int = SINKS,
    window: int = WINDOW,
    limit: int | None = None,
) -> tuple[LayerOptions, Prompt, int, None, tuple[Tensor | None, Tensor | None]]:
    """The arguments of a layer of a cache with the scheme `name`; learned codebooks are random.

    Args:
        limit: tokens that it allocates and may hold; None = it grows.
    """
    scheme = kv_scheme(name)
    books = [_codebook(part, kv_heads, device) for part in (scheme.key, scheme.value)]
    return LayerOptions(scheme, sinks, window, limit), Prompt(), 0, None, (books[0], books[1])


def _codebook(scheme: VQScheme, heads: int, device: str) -> Tensor | None:
    """Codebooks fp16 [heads, groups of channels, entries, x] of a learned scheme, else None."""
    if not learned(scheme):
        return None
    shape = kv_codebook_spec(scheme, heads, HEAD_DIM, "the layer").shape
    return torch.randn(shape, device=device).half()


def coded_cache(
    name: str, kv_heads: int, batch: int, context: int, dtype: torch.dtype, device: str = "cuda"
) -> CachedKV:
    """Random KV cache view for attention of one token; `context` tokens include it."""
    layer = VQCacheLayer(*layer_arguments(name, kv_heads, device))
    few = min(context, _ENCODED)
    layer.update(*torch.randn(2, 1, kv_heads, few, HEAD_DIM, device=device).to(dtype).unbind())
    layer.batch_repeat_interleave(batch)
    if context > few:
        layer.length += context - few
        for store in (layer.k, layer.v):
            buffer, count = store.codes, len(store.codes) + context - few
            buffer.replace(_repeated(buffer.rows(), count), _repeated(buffer.scales(), count))
    handle = layer.keys
    assert isinstance(handle, VQHandle)
    return handle.update.cached._replace(fresh=1)


def _repeated(tokens: Tensor, count: int) -> Tensor:
    times = -(-count // tokens.shape[2])
    return tokens.repeat(1, 1, times, 1)[:, :, :count]


def copy_of(cached: Cached) -> Cached:
    """The cache elsewhere in memory, as that of another layer: only universal codebooks are the
    same."""
    found: dict[str, Any] = {
        key: value.clone()
        for key, value in cached._asdict().items()
        if isinstance(value, Tensor) and not (key.startswith("codebook") and value.ndim == 3)
    }
    return cached._replace(**found)


def bytes_read(cached: CachedKV) -> int:
    """Bytes that attention of one token must read: codes and scales, floats, codebooks."""
    near = min(cached.length, cached.window)
    floats = near + min(cached.sink_k.shape[2], cached.length - near)
    total = 0.0
    if cached.length > floats:
        total += cached.codebook_k.nbytes + cached.codebook_v.nbytes
    for tail, spec in ((cached.tail_k, cached.key_scheme), (cached.tail_v, cached.value_scheme)):
        rows, dim = tail.shape[0] * tail.shape[1], tail.shape[3]
        coded = parse(spec).bits(dim) / 8 * dim
        exact = tail.element_size() * dim
        total += rows * (floats * exact + (cached.length - floats) * coded)
    return round(total)
