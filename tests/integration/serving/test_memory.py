"""What fits into a budget, and what is allocated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig

from hf_vq.cache import VQCache
from tests.fixtures.continuous_batching import MARKS, batching, prompts_of, serve
from tests.fixtures.generation import build

pytestmark = MARKS

GB = 1 << 30
LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "head_dim": 128,
}  # fmt: skip


def caches(config: Any, scheme: str, budget: int, monkeypatch: Any, **fields: Any) -> Any:
    """Transformers' own cache and ours for one budget, without the memory itself."""
    from transformers.generation.continuous_batching import cache
    from transformers.generation.continuous_batching.distributed import DistributedHelper
    from transformers.generation.continuous_batching.initialization import (
        resolve_continuous_batching_config,
    )

    from hf_vq.serving.cache import PagedCodes

    monkeypatch.setattr(
        cache.PagedAttentionMemoryHandler, "get_available_memory", lambda self: budget
    )
    config._attn_implementation = "sdpa"
    settings = resolve_continuous_batching_config(
        config, batching(num_blocks=None, page_size=256, **fields), None, False, torch.device("cpu")
    )
    helper = DistributedHelper(None, None, {})
    arguments = config, settings, torch.device("meta"), helper, torch.bfloat16, True
    template = VQCache(config, scheme, sinks=0, window=0)
    return cache.PagedAttentionCache(*arguments), PagedCodes(template, *arguments)


def tokens_of(cache: Any) -> int:
    return int(cache.num_blocks * 256)


@pytest.mark.parametrize(("scheme", "bits"), [("u4", 4.125), ("u2", 2.125)])
def test_more_tokens_fit(scheme: str, bits: float, monkeypatch: Any) -> None:
    floats, codes = caches(
        LlamaConfig(**LLAMA_8B), scheme, 8 * GB, monkeypatch, max_batch_tokens=1024
    )
    elements = 32 * 2 * 8 * 128
    ratio = floats.bytes_per_sector / codes.bytes_per_sector
    assert ratio == pytest.approx(16 / bits)
    assert codes.bytes_per_sector * 8 == elements * 256 * bits
    # Masks and copies of floats cost Transformers more than copies of codes cost us.
    assert tokens_of(codes) > ratio * tokens_of(floats)
    for cache in (floats, codes):
        assert cache.cache_tensor.nbytes == (cache.num_sectors + 2) * cache.bytes_per_sector
    # What the formula of docs/serving.md says, by hand.
    logits = 1024 * (4096 * 2 + 128256 * 4)
    token = 2 * (4096 + 32 * 128 + 2 * 8 * 128 + (2 * 32 + 8) * 128) + 9 * 4 + 2 * 8
    left = 8 * GB - (256 << 20) - logits - 1024 * token - 2 * codes.bytes_per_sector
    beside = 2 * (codes.bytes_per_sector // 256 // 32) + 48
    assert codes.num_sectors == left // (codes.bytes_per_sector + 256 * beside)
    assert codes.cache_tensor.nbytes < 8 * GB


@pytest.mark.parametrize(("full", "dim"), [(1, 128), (5, 256), (2, 64)])
def test_sliding_layers_share_the_memory(full: int, dim: int, monkeypatch: Any) -> None:
    kinds = ["sliding_attention"] * 5 + ["full_attention"] * full
    config = Gemma3TextConfig(
        hidden_size=512, num_hidden_layers=5 + full, num_attention_heads=8, head_dim=dim,
        num_key_value_heads=4, vocab_size=1000, layer_types=kinds, sliding_window=1024,
    )  # fmt: skip
    floats, codes = caches(config, "u4", 2 * GB, monkeypatch, max_batch_tokens=256)
    rings = codes.cache_allocators["sliding_attention"]
    needed = sum(page.nbytes for page in codes.codes.formats.values())
    assert needed <= codes.codes.bytes_per_block < 1.2 * needed
    assert codes.bytes_per_sector % rings.bytes_per_block == 0
    assert codes.bytes_per_sector % codes.codes.bytes_per_block == 0
    assert codes.bytes_per_sector <= 8 * max(rings.bytes_per_block, codes.codes.bytes_per_block)
    assert codes.cache_tensor.nbytes < 2 * GB
    assert tokens_of(codes) > tokens_of(floats)


def test_memory_is_what_was_planned() -> None:
    model = build("gqa")
    _, cache = serve(model, prompts_of(20, 9), num_blocks=30)
    assert cache.num_blocks == 30
    block = 2 * 2 * (2 * 8 * (8 + 2))  # layers, sides, heads x tokens x (codes + scale)
    assert cache.codes.bytes_per_block == block
    assert cache.cache_tensor.nbytes == 32 * block
