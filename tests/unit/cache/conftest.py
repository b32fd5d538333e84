"""A config and tokens small enough to follow by hand. Every test runs on both orders of codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from hf_vq.cache import VQCache
from tests.fixtures.kv.layouts import layouts  # noqa: F401


@pytest.fixture
def config() -> LlamaConfig:
    """Of a model whose keys do not turn with the position, as those of `tokens` do not."""
    return LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, no_rope_layers=[0, 0],
    )  # fmt: skip


@pytest.fixture
def tokens() -> Callable[..., tuple[Tensor, Tensor]]:
    """Random keys with a mean, and values."""

    def make(count: int, batch: int = 2, dim: int = 16) -> tuple[Tensor, Tensor]:
        shift = 3 * torch.randn(batch, 2, 1, dim)
        return torch.randn(batch, 2, count, dim) + shift, torch.randn(batch, 2, count, dim)

    return make


@pytest.fixture
def feed() -> Callable[..., Any]:
    """Update every layer with tokens [begin, end) of keys and values; returns the last layer's."""

    def run(cache: VQCache, states: tuple[Tensor, Tensor], begin: int, end: int) -> Any:
        result = None
        for index in range(len(cache.layers)):
            result = cache.update(*(x[:, :, begin:end] for x in states), index)
        return result

    return run
