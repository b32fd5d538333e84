"""Kernels that a layer of a cache is bound to: pickling, and backends that have none."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from hf_vq import VQCache
from hf_vq.errors import VQBackendError

Tokens = Callable[..., tuple[Tensor, Tensor]]
Feed = Callable[..., Any]


def floats(cache: VQCache) -> list[Tensor]:
    """All keys and values, decoded."""
    return [x * 1.0 for layer in cache.layers for x in (layer.keys, layer.values)]


def test_a_pickled_cache_goes_on(config: LlamaConfig, tokens: Tokens, feed: Feed) -> None:
    states = tokens(80)
    cache = VQCache(config, window=4)
    feed(cache, states, 0, 50)
    feed(cache, states, 50, 51)  # kernels are bound by now
    loaded = pickle.loads(pickle.dumps(cache))
    for found in (loaded, cache):
        feed(found, states, 51, 80)
    assert all(map(torch.equal, floats(loaded), floats(cache)))


def test_a_token_that_nothing_is_asked_of_needs_no_kernel(
    config: LlamaConfig, tokens: Tokens, feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = tokens(40)
    cache = VQCache(config, window=16)
    feed(cache, states, 0, 10)
    monkeypatch.setenv("HF_VQ_BACKEND", "triton")  # has none for caches
    for position in range(10, 16):
        feed(cache, states, position, position + 1)
    assert cache.get_seq_length() == 16
    with pytest.raises(VQBackendError, match="HF_VQ_BACKEND=triton"):
        feed(cache, states, 16, 40)
