"""`model.generate` with a static `VQCache`: compiled without a graph break, token for token as with
the cache that grows. Dynamo runs with the backend `eager`; tests/gpu/models has inductor and
CUDA graphs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CompileConfig, EncoderDecoderCache, GenerationConfig
from transformers.generation import GenerationMode

from hf_vq.cache import VQCache
from hf_vq.errors import VQCacheError
from hf_vq.hf import attention_choice, generation
from tests.fixtures.generation import build, greedy, prompt
from tests.fixtures.static_generation import CAPACITY, padded

pytestmark = pytest.mark.usefixtures("reference_kernels", "counters")


def compiled(backend: str = "eager") -> CompileConfig:
    config = CompileConfig(fullgraph=True, backend=backend, mode=None)
    config._compile_all_devices = True
    return config


def static_cache(model: Any, **options: Any) -> VQCache:
    return VQCache(model.config, max_cache_len=CAPACITY, static=True, **{"window": 8, **options})


@pytest.mark.filterwarnings("ignore:.*lru_cache.*:UserWarning")
@pytest.mark.parametrize(
    ("name", "implementation"),
    [("gqa", "sdpa"), ("qwen3", "vq"), ("gemma3", "sdpa"), ("gpt_oss", "vq")],
)
def test_compiled_equals_growing(name: str, implementation: str, counters: dict[str, int]) -> None:
    model = build(name, implementation)
    cache = static_cache(model)
    # Longer than sinks and window, within the window, one token; padding beyond the sinks. What is
    # compiled for the first runs all others; in Transformers' sliding layers it depends on lengths.
    for lengths in ([30, 19], [5, 5], [9, 2], [1, 1]):
        ids, mask = padded(lengths)
        options = {"attention_mask": mask, "new": 14}
        wanted = greedy(model, ids, VQCache(model.config, window=8), **options)
        cache.reset()
        out = greedy(model, ids, cache, compile_config=compiled(), **options)
        assert torch.equal(out, wanted) and set(cache.fallbacks.values()) == {0}
        assert counters["unique_graphs"] == 1 or name in ("gemma3", "gpt_oss")
    for settings in ({}, {"compile_config": compiled()}):
        graphs = counters["unique_graphs"]
        out = greedy(model, ids, static_cache(model), **settings, **options)
        assert torch.equal(out, wanted) and counters["unique_graphs"] == graphs > 0


def test_several_turns(counters: dict[str, int]) -> None:
    model = build("gqa")
    caches = VQCache(model.config, window=8), static_cache(model)
    ids, mask = padded([12, 7])
    for new in (6, 3, 40):
        outs = [
            greedy(model, ids, cache, 6, attention_mask=mask, compile_config=compiled())
            for cache in caches
        ]
        assert torch.equal(*outs)
        if new < 40:
            ids = torch.cat([outs[0], prompt(new, 2)], 1)
            mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
    assert counters["unique_graphs"] == 1
    # A static cache keeps the memory of a rotary mean and of factors, also of zeros and ones.
    kept = [
        [part for layer in cache.layers for part in (layer.k.rotary_mean, layer.k.smoothing)]
        for cache in caches
    ]
    spare = [sum(part.nbytes for part in parts if part is not None) for parts in kept]
    assert caches[0].nbytes - spare[0] == caches[1].nbytes - spare[1]


def test_by_hand_and_several_tokens_at_once(counters: dict[str, int]) -> None:
    """A compiled model called with plain 2-d masks, or none; candidates of four tokens."""
    model = build("gqa")
    forward = torch.compile(model, fullgraph=True, backend="eager")
    ids = prompt(60, 2)
    grown, static = VQCache(model.config, window=8), static_cache(model)
    with torch.no_grad():
        for cache in (grown, static):
            model(ids[:, :20], past_key_values=cache)
        end = 20
        for new in (1, 1, 4, 1, 4, 1):
            part = ids[:, end : end + new]
            end += new
            wanted = model(part, past_key_values=grown).logits
            found = forward(part, past_key_values=static).logits
            assert (found - wanted).abs().max() < 1e-3
    assert static.get_seq_length() == 32 and int(static.layers[0].static.cache_seqlens) == 32
    assert counters["unique_graphs"] <= 3
    with pytest.raises(Exception, match="run the prompt without"), torch.no_grad():
        forward(ids[:, :2], past_key_values=static_cache(model))


def test_beams_and_samples_without_compiling() -> None:
    model = build("gqa")
    ids, mask = padded([20, 11])
    for options in ({"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2, "top_k": 5}):
        outs = []
        for cache in (VQCache(model.config, window=8), static_cache(model)):
            torch.manual_seed(3)
            outs.append(greedy(model, ids, cache, 8, attention_mask=mask, **options))
        assert torch.equal(*outs)
    with pytest.raises(VQCacheError, match=r"assisted decoding.*static=False"):
        greedy(model, ids[:1], static_cache(model), 4, prompt_lookup_num_tokens=3)


def test_too_short_is_said_before_anything_runs() -> None:
    model = build("gqa")
    cache, ids = static_cache(model), prompt(30)
    with pytest.raises(VQCacheError, match=r"may need 81 tokens.*max_cache_len=80"):
        greedy(model, ids, cache, 52)
    assert cache.get_seq_length() == 0
    assert greedy(model, ids, cache, 51).shape == (1, 81)
    assert cache.get_seq_length() == CAPACITY


def test_attention_that_does_not_read_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("gqa", "eager")
    ids = prompt(30)
    eager = greedy(model, ids, static_cache(model))  # step by step it does
    model.set_attn_implementation("sdpa")
    assert torch.equal(eager, greedy(model, ids, static_cache(model)))
    model.set_attn_implementation("eager")
    with monkeypatch.context() as patch:
        patch.setattr(attention_choice, "_is_vq", lambda *arguments: False)
        with pytest.raises(VQCacheError, match=r"does not read codes.*static=False"):
            greedy(model, prompt(30), static_cache(model))
    with pytest.raises(Exception, match="can only be read by attention on codes"):
        greedy(model, prompt(30), static_cache(model), compile_config=compiled())


@pytest.mark.parametrize(
    ("change", "static"),
    [
        ({}, True),
        ({"device": "cpu"}, False),
        ({"device": "cpu", "compiles": True}, True),
        ({"attention": "eager"}, False),
        ({"mode": GenerationMode.BEAM_SEARCH}, False),
        ({"chunk": 5}, False),
        ({"assistant": True}, False),
        ({"mode": GenerationMode.SAMPLE}, True),
    ],
)
def test_generate_decides(change: dict[str, Any], static: bool) -> None:
    asked = {
        "device": "cuda", "attention": "sdpa", "mode": GenerationMode.GREEDY_SEARCH, "chunk": None,
        "assistant": False, "compiles": False, **change,
    }  # fmt: skip
    config = build("gqa").config
    model = SimpleNamespace(
        device=torch.device(asked["device"]),
        config=SimpleNamespace(_attn_implementation=asked["attention"], is_encoder_decoder=False),
    )
    cache = VQCache(config, max_cache_len=CAPACITY)
    settings = GenerationConfig(prefill_chunk_size=asked["chunk"])
    settings.is_assistant = asked["assistant"]
    settings.compile_config = compiled() if asked["compiles"] else None
    generation._decide(model, settings, cache, cache, asked["mode"], 2, 70)
    assert cache.is_compileable is static
    if not change:
        pair = [VQCache(config, max_cache_len=CAPACITY) for _ in range(2)]
        both = EncoderDecoderCache(*pair)
        generation._decide(model, settings, pair[0], both, asked["mode"], 2, 70)
        assert not any(cache.is_compileable or cache._static for cache in pair)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_inductor(counters: dict[str, int]) -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        pytest.skip("inductor needs a C++ compiler")
    model = build("gqa")
    ids, mask = padded([20, 13])
    wanted = greedy(model, ids, VQCache(model.config, window=8), 12, attention_mask=mask)
    out = greedy(
        model, ids, static_cache(model), 12, attention_mask=mask,
        compile_config=compiled("inductor"),
    )  # fmt: skip
    assert torch.equal(out, wanted) and counters["unique_graphs"] == 1
