"""Queries of a prompt reach the layers of its cache, whichever attention the model runs."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import hf_vq  # noqa: F401  chooses attention by the cache
from hf_vq.cache import VQCache, VQCacheLayer, key_means
from hf_vq.transforms.key_smoothing import FEWEST

DIM, HEADS = 32, 2
IMPLEMENTATIONS = ["sdpa", "eager", "vq"]


@pytest.fixture
def model() -> LlamaForCausalLM:
    """Random, with outliers among the channels of its keys where its queries are small."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2 * HEADS, num_key_value_heads=HEADS, head_dim=DIM,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(6.0)
    for layer in model.model.layers:
        sizes = (1.2 * torch.randn(HEADS, DIM // 2)).exp()
        sizes = torch.cat([sizes, sizes], -1)
        keys, queries = layer.self_attn.k_proj.weight.data, layer.self_attn.q_proj.weight.data
        keys.mul_(sizes.flatten()[:, None])
        queries.div_(sizes.repeat_interleave(2, 0).flatten()[:, None])
    return model


def smoothed(cache: VQCache) -> bool:
    return any(
        layer.k.smoothing is not None and bool((layer.k.smoothing != 1).any())
        for layer in cache.layers
    )


def run(model: Any, cache: VQCache, ids: Tensor, prompt: int, **options: Any) -> Tensor:
    """Logits of the tokens behind the prompt, one by one."""
    with torch.no_grad():
        model(ids[:, :prompt], past_key_values=cache, **options)
        some = [
            model(ids[:, at : at + 1], past_key_values=cache).logits
            for at in range(prompt, ids.shape[1])
        ]
    return torch.cat(some, 1)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_attention_shows_queries(
    model: LlamaForCausalLM, implementation: str, static: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.set_attn_implementation(implementation)
    seen: list[tuple[Tensor, Tensor]] = []
    real = VQCacheLayer.see_queries

    def spy(self: VQCacheLayer, query: Tensor, keys: Tensor) -> None:
        seen.append((query, keys))
        real(self, query, keys)

    monkeypatch.setattr(VQCacheLayer, "see_queries", spy)
    cache = VQCache(model.config, window=8, max_cache_len=80, static=static)
    run(model, cache, torch.randint(0, 64, (2, 63)), 60)
    assert smoothed(cache) and len(seen) == 2  # of two layers, by the prompt alone
    for query, keys in seen:
        assert query.shape == (2, 2 * HEADS, 60, DIM) and keys.shape == (2, HEADS, 60, DIM)
        assert keys not in key_means._asking


def test_the_same_factors_with_every_attention(model: LlamaForCausalLM) -> None:
    ids, found = torch.randint(0, 64, (2, 60)), []
    for implementation in IMPLEMENTATIONS:
        model.set_attn_implementation(implementation)
        for static in (False, True):
            cache = VQCache(model.config, window=8, max_cache_len=80, static=static)
            run(model, cache, ids, 60 - 1)
            found.append(cache.layers[0].k.smoothing)
    for factor in found[1:]:
        torch.testing.assert_close(factor, found[0], rtol=1e-4, atol=0)


def test_a_layer_of_another_position_is_not_smoothed() -> None:
    """GPT-2 has no RoPE."""
    config = GPT2Config(n_embd=64, n_layer=2, n_head=2, n_positions=64, vocab_size=64)
    cache = VQCache(config, window=8)
    run(GPT2LMHeadModel(config).eval(), cache, torch.randint(0, 64, (1, 52)), 50)
    assert not smoothed(cache) and cache.layers[0].k.smoothing is None


def test_a_short_prompt(model: LlamaForCausalLM) -> None:
    for more, wanted in ((-1, False), (0, True)):
        cache = VQCache(model.config, window=8)
        run(model, cache, torch.randint(0, 64, (1, 40)), cache.options.sinks + FEWEST + more)
        assert smoothed(cache) == wanted


@pytest.mark.parametrize("scheme", ["u4", "u3", "nomad-u4"])
def test_logits_with_outliers(
    model: LlamaForCausalLM, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The divergence from exact keys and values is less than half of that without smoothing."""
    ids = torch.randint(0, 64, (4, 160))
    with torch.no_grad():
        exact = model(ids).logits[:, 120:].log_softmax(-1)
    found = []
    for sees in (True, False):
        with monkeypatch.context() as patch:
            if not sees:
                patch.setattr(VQCacheLayer, "see_queries", lambda *_: None)
            cache = VQCache(model.config, scheme, window=4)
            logits = run(model, cache, ids, 120).log_softmax(-1)
        assert smoothed(cache) == sees
        found.append(float((exact.exp() * (exact - logits)).sum(-1).mean()))
    assert 0 < found[0] < found[1] / 2, found


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients(model: LlamaForCausalLM, implementation: str) -> None:
    """Of a prompt they flow as without a cache, and factors have none."""
    model.set_attn_implementation(implementation)
    ids, gradients = torch.randint(0, 64, (1, 50)), []
    for cache in (None, VQCache(model.config, window=8)):
        model.zero_grad()
        model(ids, past_key_values=cache, use_cache=cache is not None).logits.square().sum(
        ).backward()  # fmt: skip
        gradients.append(model.model.layers[0].self_attn.k_proj.weight.grad.clone())
        if cache is not None:
            assert smoothed(cache) and not cache.layers[0].k.smoothing.requires_grad
    torch.testing.assert_close(*gradients)


def test_nothing_keeps_a_model(model: LlamaForCausalLM) -> None:
    """Nor a cache, once they are deleted; keys that attention never saw are no exception."""
    cache = VQCache(model.config, window=8)
    run(model, cache, torch.randint(0, 64, (1, 60)), 58)
    other = VQCache(model.config, window=8)
    keys = torch.randn(1, HEADS, 40, DIM)
    other.update(keys, keys.clone(), 0)
    held = [weakref.ref(x) for x in (model.model, cache, cache.layers[0], other.layers[0])]
    copied = LlamaForCausalLM(model.config)
    del model, cache, other
    gc.collect()
    # The fixture holds the model itself; its caches are gone.
    assert [each() is None for each in held] == [False, True, True, True]
    own = weakref.ref(copied)
    with torch.no_grad():
        copied(torch.randint(0, 64, (1, 60)), past_key_values=VQCache(copied.config, window=8))
    del copied
    gc.collect()
    assert own() is None


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("beams", [1, 2])
def test_generate(model: LlamaForCausalLM, padded: bool, beams: int) -> None:
    """Growing and static caches agree, and rows with their own batch of one."""
    ids = torch.randint(1, 64, (2, 60))
    mask = torch.ones_like(ids)
    if padded:
        ids[1, :13], mask[1, :13] = 0, 0

    def tokens(ids: Tensor, mask: Tensor, cache: VQCache) -> Tensor:
        found = model.generate(
            ids, attention_mask=mask, past_key_values=cache, max_new_tokens=6, do_sample=False,
            num_beams=beams,
        )  # fmt: skip
        assert smoothed(cache)
        return torch.as_tensor(found)[:, ids.shape[1] :]

    found = tokens(ids, mask, VQCache(model.config, window=8, strict=True))
    first = 13 if padded else 0
    for row, begin in ((0, 0), (1, first)):
        own = slice(row, row + 1)
        alone = tokens(
            ids[own, begin:], mask[own, begin:], VQCache(model.config, window=8, strict=True)
        )
        assert torch.equal(found[own], alone)
    if beams == 1:
        cache = VQCache(model.config, window=8, static=True, max_cache_len=80)
        with torch.no_grad():
            assert torch.equal(tokens(ids, mask, cache), found)
