"""`model.generate` with a static `VQCache`: compiled without a graph break, token for token as with
the cache that grows. Dynamo runs with the backend `eager`; inductor and CUDA graphs at the end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_generate import build, greedy, prompt
from torch import Tensor
from transformers import CompileConfig, EncoderDecoderCache, GenerationConfig, StaticCache
from transformers.generation import GenerationMode

from hf_vq import dispatch
from hf_vq.cache import VQCache
from hf_vq.errors import VQCacheError
from hf_vq.hf import attention_choice, generation

pytestmark = pytest.mark.usefixtures("reference_kernels")
CAPACITY = 80


@pytest.fixture(autouse=True)
def counters() -> dict[str, int]:
    """What Dynamo counts, from zero."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch._dynamo.utils.counters["stats"]


def compiled(backend: str = "eager") -> CompileConfig:
    config = CompileConfig(fullgraph=True, backend=backend, mode=None)
    config._compile_all_devices = True
    return config


def static_cache(model: Any, **options: Any) -> VQCache:
    return VQCache(model.config, max_cache_len=CAPACITY, static=True, **{"window": 8, **options})


def padded(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Ids and mask of rows with left padding."""
    longest = max(lengths)
    mask = (torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]).long()
    return prompt(longest, len(lengths)) * mask, mask


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
    assert caches[0].nbytes == caches[1].nbytes


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("name", "implementation"), [("gqa", "sdpa"), ("gpt_oss", "vq"), ("gemma3", "sdpa")]
)
def test_cuda_graphs(name: str, implementation: str, counters: dict[str, int]) -> None:
    """generate() on a GPU with nothing said: CUDA graphs, no recompiles for a new cache."""
    model = build(name, implementation).cuda()
    lengths = [30, 19]
    ids, mask = (x.cuda() for x in padded(lengths))
    wanted = greedy(model, ids, VQCache(model.config, window=8), 40, attention_mask=mask)
    caches = [VQCache(model.config, max_cache_len=CAPACITY, window=8) for _ in range(3)]
    out = greedy(model, ids, caches[0], 40, attention_mask=mask, disable_compile=True)
    assert torch.equal(out, wanted) and not counters["unique_graphs"]
    caches[0].reset()
    for cache in caches:
        before = counters["unique_graphs"]
        out = greedy(model, ids, cache, 40, attention_mask=mask)
        assert cache.is_compileable and torch.equal(out, wanted)
        assert set(cache.fallbacks.values()) == {0}
        if cache is not caches[0]:
            assert counters["unique_graphs"] == before
    assert not torch._dynamo.utils.counters["graph_break"]
    skipped = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    torch._dynamo.utils.counters["inductor"].clear()
    torch._dynamo.reset()
    plain = StaticCache(config=model.config, max_cache_len=CAPACITY)
    greedy(model, ids, plain, 40, attention_mask=mask)
    # No more reasons against CUDA graphs than Transformers' own static cache has.
    assert skipped <= torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_fused_kernels_in_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels alone, no reference: the growing cache with them is as near to float32 as this."""
    model = build("gqa", head_dim=64).cuda()
    ids, mask = (x.cuda() for x in padded([60, 37]))

    def logits(cache: VQCache) -> Tensor:
        out = greedy(
            model, ids, cache, 1, attention_mask=mask, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        steps, seen = [out.logits[0]], mask
        run = model.get_compiled_call(None) if cache.is_compileable else model
        for token in torch.arange(3, 43).cuda():  # the same tokens for all
            seen = torch.nn.functional.pad(seen, (0, 1), value=1)
            inputs = model.prepare_inputs_for_generation(
                token.expand(2, 1), past_key_values=cache, attention_mask=seen,
                position_ids=seen.sum(1, keepdim=True) - 1,
            )  # fmt: skip
            torch.compiler.cudagraph_mark_step_begin()
            with torch.no_grad():
                steps.append(run(**inputs).logits[:, -1].float().clone())
        return torch.stack(steps)

    exact = logits(VQCache(model.config, window=8))
    model.to(torch.bfloat16)
    monkeypatch.delenv("HF_VQ_BACKEND")
    of_cache = ("kv_append", "kv_attention")
    kernels = [
        entry
        for entry in dispatch.ENTRIES
        if not (entry.op in of_cache and entry.name == "reference")
    ]
    with dispatch.using(kernels):
        grown = logits(VQCache(model.config, window=8))
        static = [logits(VQCache(model.config, max_cache_len=128, window=8)) for _ in range(3)]
    assert torch.equal(static[0], static[1]) and torch.equal(static[0], static[2])
    assert (static[0] - exact).abs().mean() <= 2 * (grown - exact).abs().mean()
