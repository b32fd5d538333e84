"""Models whose keys have a strong bias: rotary means are found, and codes lose less."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache

import hf_vq.cache.key_means
from hf_vq import VQCache
from hf_vq.cache import rotary
from hf_vq.calibration.kv_codebooks import calibrate_kv
from tests.fixtures.generation import SMALL

SIZES = {**SMALL, "head_dim": 32, "attention_bias": True}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
# name: (family, fields, layers whose keys turn, whether neighbours are a pair)
MODELS: dict[str, tuple[str, dict[str, Any], list[int], bool]] = {
    "qwen2": ("qwen2", {}, [0, 1], False),
    "llama3": ("llama", {"rope_parameters": LLAMA3}, [0, 1], False),
    "yarn": ("llama", {"rope_parameters": YARN}, [0, 1], False),
    "cohere": ("cohere", {}, [0, 1], True),
    "glm": ("glm", {"rope_parameters": PARTIAL}, [0, 1], True),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}, [0], False),
}


def biased(name: str) -> Any:
    """A tiny random model with a key bias of 20 times what a token changes."""
    family, fields, _, _ = MODELS[name]
    config = CONFIG_MAPPING[family](**{**SIZES, **fields})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.k_proj.weight.normal_(std=0.1)
            attention.q_proj.weight.normal_(std=0.05)
            if attention.k_proj.bias is None:
                attention.k_proj.bias = torch.nn.Parameter(torch.zeros(64))
            attention.k_proj.bias.normal_(std=20.0)
    return model


def prompt(length: int = 70, batch: int = 1) -> Tensor:
    return torch.randint(3, 90, (batch, length))


@torch.no_grad()
def greedy(model: Any, ids: Tensor, cache: Any, tokens: int = 30) -> tuple[Tensor, Tensor]:
    """Logits of the prompt's last token and of those that follow, and their ids."""
    found, step = [], ids
    for _ in range(tokens):
        found.append(model(step, past_key_values=cache).logits[:, -1])
        step = found[-1].argmax(-1, keepdim=True)
    return torch.stack(found, 1), torch.stack(found, 1).argmax(-1)


def coding_error(cache: VQCache, layer: int, exact: DynamicCache) -> float:
    keys = exact.layers[layer].keys
    count = keys.shape[2]
    return float((cache.layers[layer].keys[:, :, :count] - keys)[:, :, 4:].abs().mean())


@pytest.mark.parametrize("name", MODELS)
def test_rotary_means_are_found_and_codes_lose_less(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = biased(name), prompt()
    _, _, turning, interleaved = MODELS[name]
    exact = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=exact)
    caches = [
        VQCache(model.config, window=8, max_cache_len=120, static=static)
        for static in (False, True)
    ]
    texts = [greedy(model, ids, cache) for cache in caches]
    assert torch.equal(texts[0][1], texts[1][1])
    for layer in caches[0].coded_layers:
        assert (layer.k.rotary_mean is not None) == (layer.index in turning)
        assert layer.index not in turning or layer._rotary.interleaved == interleaved
    with monkeypatch.context() as patch:
        patch.setattr(hf_vq.cache.rotary, "inverse_frequencies", lambda *_: None)
        standing = VQCache(model.config, window=8)
        greedy(model, ids, standing, 1)
    ours = VQCache(model.config, window=8)
    greedy(model, ids, ours, 1)
    for index in turning:
        assert coding_error(ours, index, exact) < 0.5 * coding_error(standing, index, exact)


@pytest.mark.parametrize("bias", [0.2, 20.0])
def test_a_gpu_calibrates_what_it_uses(bias: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rotary.LEAST, "cpu", rotary.LEAST["cuda"])
    model = biased("qwen2")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.mul_(bias / 20)
    books = calibrate_kv(model, "u4", prompt(256)[0], tokens=256, context=128, progress=False)
    assert (books.key_rotary_means is not None) == (bias == 20)


def test_generate_with_left_padding_is_generate_alone() -> None:
    model, rows = biased("qwen2"), [prompt(60), prompt(48)]
    longest = 60
    ids = torch.cat([torch.nn.functional.pad(x, (longest - x.shape[1], 0)) for x in rows])
    mask = (torch.arange(longest) >= longest - torch.tensor([60, 48])[:, None]).long()
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    cache = VQCache(model.config, window=8)
    both = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
    assert cache.layers[0].k.rotary_mean is not None and not any(cache.fallbacks.values())
    for row, alone in enumerate(rows):
        one = VQCache(model.config, window=8)
        found = model.generate(alone, past_key_values=one, **options)
        assert torch.equal(found[0, alone.shape[1] :], both[row, longest:])


@pytest.mark.parametrize("name", ["qwen2", "cohere"])
def test_calibrated_means_make_chunks_equal_to_a_prompt_at_once(name: str) -> None:
    model = biased(name)
    books = calibrate_kv(model, "u4", prompt(256)[0], tokens=256, context=128, progress=False)
    assert books.key_rotary_means is not None
    assert books.rotary_interleaved == MODELS[name][3]
    ids, rows = prompt(), []
    for sizes in ([70], [8] * 8 + [6], [1] * 70):
        cache = VQCache(model.config, window=8, codebooks=books)
        with torch.no_grad():
            for piece in ids.split(sizes, 1):
                model(piece, past_key_values=cache)
        rows.append(cache.layers[0].k.codes.rows())
    for other in rows[1:]:  # the first layer's keys do not depend on what was coded
        assert (other != rows[0]).float().mean() < 0.01  # but for sums in another order
    exact = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=exact)
    assert coding_error(cache, 0, exact) < 0.5
