"""Coded caches of random tokens, as `VQCache` makes them, of any length at once.

How fast a kernel is does not depend on the numbers, but it may on how codes are distributed: so
some tokens are really encoded, and a longer cache repeats their codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_vq.cache import LazyKV
from hf_vq.cache.codebooks import learned
from hf_vq.cache.layer import LayerOptions, VQCacheLayer
from hf_vq.cache.prompt import Prompt
from hf_vq.formats.catalog import kv_scheme
from hf_vq.formats.scheme import VQScheme
from hf_vq.formats.tensors import kv_codebook_spec
from hf_vq.ops import KVCacheView

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
) -> KVCacheView:
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
    assert isinstance(handle, LazyKV)
    return handle.update.view._replace(num_new=1)


def _repeated(tokens: Tensor, count: int) -> Tensor:
    times = -(-count // tokens.shape[2])
    return tokens.repeat(1, 1, times, 1)[:, :, :count]


def copy_of(cached: KVCacheView) -> KVCacheView:
    """The cache elsewhere in memory, as that of another layer: only universal codebooks are the
    same."""
    universal = [side.codebook for side in (cached.key, cached.value) if side.codebook.ndim == 3]
    kept = {id(book) for book in universal}
    return cached.map(lambda x: x if id(x) in kept else x.clone())


def bytes_read(cached: KVCacheView) -> int:
    """Bytes that attention of one token must read: codes and scales, floats, codebooks."""
    near = min(cached.max_seqlen, cached.window)
    floats = near + min(cached.key.sinks.shape[2], cached.max_seqlen - near)
    total = 0.0
    if cached.max_seqlen > floats:
        total += cached.key.codebook.nbytes + cached.value.codebook.nbytes
    for side in (cached.key, cached.value):
        rows, dim = side.recent.shape[0] * side.heads, side.dim
        coded = side.parsed.bits(dim) / 8 * dim
        exact = side.recent.element_size() * dim
        total += rows * (floats * exact + (cached.max_seqlen - floats) * coded)
    return round(total)
