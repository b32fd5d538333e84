"""What a layer stores does not depend on the mode of autograd or autocast it was stored in."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from hf_vq.cache import LazyKV, VQCache, attend

Tokens = Callable[..., tuple[Tensor, Tensor]]
Feed = Callable[..., Any]


def stored(cache: VQCache) -> list[Tensor]:
    layer = cache.layers[0]
    stores = [layer.k, layer.v]
    tapes = [x for s in stores for x in (s.codes.rows(), s.codes.scales(), s.tail.view())]
    return [*tapes, *(s.sinks for s in stores), layer.k.mean]


def memory(cache: VQCache) -> list[Tensor]:
    tapes = [store.codes for store in (cache.layers[0].k, cache.layers[0].v)]
    return [x for tape in tapes for x in (tape.data, tape.scale)]


@pytest.mark.parametrize("how", ["as it is", "copied", "loaded", "reordered"])
@pytest.mark.parametrize("limit", [None, 60])
def test_inference_mode_then_not(
    config: LlamaConfig, tokens: Tokens, feed: Feed, tmp_path: Path, how: str, limit: int | None
) -> None:
    states = tokens(30)
    cache, wanted = (VQCache(config, window=4, max_cache_len=limit) for _ in range(2))
    feed(wanted, states, 0, 3)
    with torch.inference_mode():
        feed(cache, tuple(x.clone() for x in states), 0, 3)  # sinks are still to come
        if how == "copied":
            cache = copy.deepcopy(cache)
        elif how == "loaded":
            cache.save(tmp_path / "c")
            cache = VQCache.load(tmp_path / "c", config)
        elif how == "reordered":
            cache.reorder_cache(torch.arange(2))
    for begin, end in ((3, 4), (4, 20), (20, 21), (21, 30)):
        feed(cache, states, begin, end)
        feed(wanted, states, begin, end)
    for a, b in zip(stored(cache), stored(wanted), strict=True):
        assert torch.equal(a, b) and (how == "copied" or not a.is_inference())
    assert not any(x.is_inference() for x in memory(cache))


def test_nothing_stored_has_a_graph(config: LlamaConfig, tokens: Tokens, feed: Feed) -> None:
    states = tuple(x.requires_grad_() for x in tokens(30))
    cache = VQCache(config, window=4)
    assert feed(cache, states, 0, 20)[0].requires_grad
    key, value = feed(cache, states, 20, 30)
    assert not isinstance(key, LazyKV) and not any(x.requires_grad for x in stored(cache))
    (key.sum() + 2 * value.sum()).backward()
    for x, slope in zip(states, (1, 2), strict=True):
        assert x.grad[:, :, :20].abs().max() == 0 and (x.grad[:, :, 20:] == slope).all()


def test_autocast(config: LlamaConfig, tokens: Tokens) -> None:
    """RoPE gives keys in float32, projections values in bfloat16."""
    keys, values = tokens(30)
    values = values.bfloat16()
    query = torch.randn(2, 4, 10, 16)
    caches, outs = [], []
    for autocast in (False, True):
        cache = VQCache(config, window=4)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            cache.update(keys[:, :, :20], values[:, :, :20], 0)
            handles = cache.update(keys[:, :, 20:], values[:, :, 20:], 0)
            assert [x.dtype for x in handles] == [torch.float32, torch.bfloat16]
            outs.append([attend(query, *handles), *(x.decode() for x in handles)])
        caches.append(cache)
    for a, b in (*zip(*map(stored, caches), strict=True), *zip(*outs, strict=True)):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_recording_ends(config: LlamaConfig, tokens: Tokens, feed: Feed) -> None:
    states = tokens(120)
    cache, plain = VQCache(config, window=4), VQCache(config, window=4)
    for each in (cache, plain):
        feed(each, states, 0, 20)
    cache.activate_past_recording()
    for each in (cache, plain):
        feed(each, states, 20, 100)
    assert len(cache.layers[0].k.tail) > len(plain.layers[0].k.tail)
    cache.stop_past_recording()
    assert cache.nbytes == plain.nbytes
    for each in (cache, plain):
        feed(each, states, 100, 120)
    assert cache.nbytes == plain.nbytes
    cache.activate_past_recording()
    cache.reset()
    assert not cache.layers[0].record_past
