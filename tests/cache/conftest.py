"""A config and tokens small enough to follow by hand. Every test runs on both orders of codes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from hf_vq import dispatch
from hf_vq.cache import VQCache
from hf_vq.formats.scheme import VQScheme
from hf_vq.ops.layout import BLOCK_BITS


def block_layouts(problem: dispatch.KVAttentionProblem) -> tuple[str, str]:
    """The block layouts that fit a problem of attention: quads for universal keys, else planes."""
    key, value = VQScheme.parse(problem.key_scheme), VQScheme.parse(problem.value_scheme)
    quads = key.codebook == "universal" and problem.head_dim // key.vector_size % 4 == 0
    return (
        ("quads" if quads else "planes") if key.entry_bits in BLOCK_BITS else "rows",
        "planes" if value.entry_bits in BLOCK_BITS else "rows",
    )


@pytest.fixture(params=["rows", "blocks"], autouse=True)
def layouts(request: pytest.FixtureRequest) -> Iterator[str]:
    """Only the reference runs, over canonical rows or over the blocks of the fast kernels."""
    entries = [entry for entry in dispatch.ENTRIES if entry.name == "reference"]
    if request.param == "blocks":
        (known,) = (entry.implementation for entry in entries if entry.op == "kv_attention")
        blocks = dataclasses.replace(known, layouts=block_layouts)
        entries.insert(0, dispatch.Entry("test.blocks", "kv_attention", blocks))
    with dispatch.using(entries):
        yield request.param


@pytest.fixture
def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16,
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
