"""`model.generate` with a `VQCache`, on tiny random models whose attention is far from uniform."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    EncoderDecoderCache,
)
from transformers.masking_utils import sdpa_mask

from hf_vq.cache import LazyKV, VQCache, codebooks
from hf_vq.cache.layer import SLACK
from hf_vq.errors import VQCacheError
from hf_vq.formats.catalog import KV_SCHEMES
from hf_vq.formats.shared import universal_tensor
from hf_vq.hf import attention, enable_cache_backend, generation
from hf_vq.ops import decode_kv, encode_kv
from hf_vq.ops.rotary_mean import measure_means, rotated
from tests.fixtures.generation import (
    MODELS,
    build,
    decoded,
    greedy,
    prompt,
    reads_codes,
)

pytestmark = pytest.mark.usefixtures("reference_kernels")

attention.register()
enable_cache_backend()


SIX = ["gqa", "qwen3", "gemma3", "gpt2", "qwen3_moe", "gpt_oss"]  # run through all of generate


def step_by_step(model: Any, ids: Tensor, cache: Any, new: int, chunk: int = 10**9) -> Tensor:
    """Greedy decoding by plain forwards."""
    with torch.no_grad():
        for part in ids[:, cache.get_seq_length() :].split(chunk, 1):
            logits = model(part, past_key_values=cache).logits
        for _ in range(new):
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
            if _ < new - 1:
                logits = model(ids[:, -1:], past_key_values=cache).logits
    return ids


@pytest.mark.parametrize("name", MODELS)
def test_every_attention_reads_the_same_cache(name: str) -> None:
    """Decoded or read as codes, under every name: token by token they are one function."""
    ids = prompt(30, batch=2)
    model = build(name, "eager")
    cache = VQCache(model.config, window=8)
    with decoded():
        eager = greedy(model, ids, cache)
    coded = len(cache.coded_layers)
    assert coded and all(count == 2 * 7 for count in cache.fallbacks.values())
    for implementation in ("eager", "vq", *(["sdpa"] if MODELS[name][2] else [])):
        model.set_attn_implementation(implementation)
        cache = VQCache(model.config, window=8, strict=name != "deepseek_v3")
        assert torch.equal(greedy(model, ids, cache), eager)
        if name != "deepseek_v3":  # its attention expands a latent: always decoded
            assert set(cache.fallbacks.values()) == {0}
        plain = greedy(model, ids, DynamicCache(config=model.config))
        assert torch.equal(greedy(model, ids), plain)
        quiet = VQCache(model.config, window=300)
        assert torch.equal(greedy(model, ids, quiet), plain)  # nothing has left the window
    assert coded == sum(kind != "sliding_attention" for kind in kinds(model.config))


def kinds(config: Any) -> list[str]:
    return getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers


@pytest.mark.parametrize("name", ["gemma3", "gemma2", "gpt_oss"])
def test_quantized_sliding_layers(name: str) -> None:
    ids = prompt(30, batch=2)
    model = build(name, "eager")
    make = lambda: VQCache(model.config, window=4, quantize_sliding=True)  # noqa: E731
    with decoded():
        eager = greedy(model, ids, make())
    for implementation in ("eager", "vq"):
        model.set_attn_implementation(implementation)
        cache = make()
        assert torch.equal(greedy(model, ids, cache), eager)
        assert set(cache.fallbacks.values()) == {0} and len(cache.coded_layers) == 2


def simulation(
    prompt_length: int, sinks: int, window: int, scheme: str, inv_freq: Tensor
) -> Callable[..., Any]:
    """Attention over a whole sequence whose tokens after the prompt came one by one.

    Args:
        inv_freq: of the model's rotary embeddings [r].
    """
    both = KV_SCHEMES[scheme]

    def coded(x: Tensor, part: Any, mean: Any) -> Tensor:
        codebook = universal_tensor(part)
        codes, scale = encode_kv(x.float() - mean, codebook, part)
        return (decode_kv(codes, scale, codebook, part, x.shape[-1]) + mean).to(x.dtype)

    def run(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any
    ) -> Any:
        groups, length = q.shape[1] // k.shape[1], q.shape[2]
        seen = torch.arange(sinks, prompt_length)
        standing, turning = measure_means(k[:, :, seen], seen, inv_freq, False)
        mean = standing + rotated(turning, inv_freq, False, torch.arange(length))
        i, j = torch.arange(length)[:, None], torch.arange(length)
        exact = (j < sinks) | (j > i - window) | ((i < prompt_length) & (j < prompt_length))
        far = coded(k, both.key, mean), coded(v, both.value, 0.0)
        k, v, far_k, far_v = (x.repeat_interleave(groups, 1) for x in (k, v, *far))
        scores = torch.where(exact, q @ k.mT, q @ far_k.mT) * scaling
        weights = scores.masked_fill(j > i, -torch.inf).softmax(-1)
        out = (weights * exact) @ v + (weights * ~exact) @ far_v
        return out.transpose(1, 2), None

    return run


@pytest.mark.parametrize("scheme", ["u4", "u2", "k4v2"])
@pytest.mark.parametrize("name", ["gqa", "qwen3"])
def test_steps_equal_the_whole_sequence(name: str, scheme: str) -> None:
    sinks, window, length = 4, 8, 40
    ids = prompt(54, batch=2)
    model = build(name)

    @torch.no_grad()
    def steps(cache: Any) -> Tensor:
        parts = [ids[:, :length], *ids[:, length:].split(1, 1)]
        return torch.cat([model(part, past_key_values=cache).logits for part in parts], 1)

    vq = steps(VQCache(model.config, scheme, sinks, window, strict=True))
    plain = steps(DynamicCache(config=model.config))
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        inv_freq = model.model.rotary_emb.inv_freq
        run = simulation(length, sinks, window, scheme, inv_freq)
        AttentionInterface.register("simulation", run)
        AttentionMaskInterface.register("simulation", sdpa_mask)
        model.set_attn_implementation("simulation")
        simulated = model(ids, use_cache=False).logits
    noise = (plain - whole).abs().max()  # float32 in another order, same model
    effect = (simulated - whole)[:, length:].abs().max()
    assert effect > 10_000 * noise
    errors = (vq - simulated).abs().amax((1, 2))  # of each row of the batch
    assert errors.min() <= 2 * noise
    # In the other row an input between two codes may take the other one: far below the effect.
    assert errors.max() <= effect / 5000


@pytest.mark.parametrize("name", SIX)
def test_left_padding_equals_each_row_alone(name: str) -> None:
    model = build(name)
    lengths = [24, 14, 3]
    rows = [prompt(length) for length in lengths]
    ids = torch.cat([torch.nn.functional.pad(row, (24 - row.shape[1], 0)) for row in rows])
    mask = (torch.arange(24) >= 24 - torch.tensor(lengths)[:, None]).long()
    together = greedy(model, ids, VQCache(model.config, window=8), attention_mask=mask)
    for index, row in enumerate(rows):
        alone = greedy(model, row, VQCache(model.config, window=8))
        assert torch.equal(together[index, 24:], alone[0, row.shape[1] :])
    if name == "gqa":
        model.set_attn_implementation("eager")
        eager = greedy(model, ids, VQCache(model.config, window=8), attention_mask=mask)
        assert torch.equal(eager, together)
        with decoded():
            eager = greedy(model, ids, VQCache(model.config, window=8), attention_mask=mask)
        assert torch.equal(eager, together)


@pytest.mark.parametrize("name", SIX)
def test_beams_and_samples(name: str) -> None:
    model = build(name)
    ids = prompt(20, batch=2)
    out = greedy(
        model, ids, VQCache(model.config, window=8), num_beams=3, num_return_sequences=2,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    # A beam's score is that of its tokens one by one, whatever rows they were in.
    cache, score = VQCache(model.config, window=8), torch.zeros(4)
    with torch.no_grad():
        logits = model(out.sequences[:, :20], past_key_values=cache).logits
        for token in out.sequences[:, 20:].split(1, 1):
            score += logits[:, -1].log_softmax(-1).gather(1, token)[:, 0]
            logits = model(token, past_key_values=cache).logits
    assert torch.allclose(score / 8, out.sequences_scores, atol=1e-4)

    ids[0, :5] = 0
    options = {"do_sample": True, "num_return_sequences": 2, "top_k": 5}
    samples = []
    for implementation in (reads_codes(name), "eager"):
        model.set_attn_implementation(implementation)
        torch.manual_seed(5)
        cache = VQCache(model.config, window=8)
        samples.append(greedy(model, ids, cache, 5, attention_mask=(ids != 0).long(), **options))
    assert torch.equal(*samples)


@pytest.mark.filterwarnings("ignore:.*return_dict_in_generate.*")
@pytest.mark.parametrize("name", SIX)
def test_assisted_decoding_is_greedy_decoding(name: str) -> None:
    model, helper = build(name), build(name)
    for parameter in helper.parameters():  # right often, but not always
        parameter.data += 0.15 * parameter.data.std() * torch.randn_like(parameter)
    helper.generation_config.num_assistant_tokens = 4
    ids = prompt(23)
    ids[0, 11:] = ids[0, :12].clone()  # something to look up
    wanted = greedy(model, ids, VQCache(model.config, window=8), 14)
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": helper}):
        cache = VQCache(model.config, window=8)
        assert torch.equal(greedy(model, ids, cache, 14, **options), wanted)
    if name == "gqa":
        plain = VQCache(helper.config, window=8)
        assert not torch.equal(greedy(helper, ids, plain, 14), wanted)  # some were rejected
    # A later turn without an assistant compresses as if there had never been one.
    assert all(layer.record_past for layer in cache.coded_layers)
    greedy(model, torch.cat([wanted, prompt(60)], 1), cache, 1)
    assert all(len(layer.k.tail) <= 8 + SLACK for layer in cache.coded_layers)
    assert not any(getattr(layer, "record_past", False) for layer in cache.layers)


@pytest.mark.parametrize("window", [3, 4])
def test_more_candidates_than_the_window(window: int) -> None:
    model = build("gqa")
    cache = VQCache(model.config, window=window)
    run = lambda: greedy(model, prompt(9), cache, 2, prompt_lookup_num_tokens=3)  # noqa: E731
    if window == 3:
        with pytest.warns(UserWarning, match=r"prompt_lookup_num_tokens=3 with VQCache\(window=3"):
            run()
    else:
        run()  # warnings are errors


@pytest.mark.parametrize("name", SIX)
def test_several_turns_and_a_shipped_prompt(name: str, tmp_path: Path) -> None:
    model = build(name)
    ids, more = prompt(20), prompt(7)
    cache = VQCache(model.config, window=8)
    first = greedy(model, ids, cache, 4)
    cache.save(tmp_path / "turn.safetensors")
    loaded = VQCache.load(tmp_path / "turn.safetensors", model.config)
    longer = torch.cat([first, more], 1)
    second = greedy(model, longer, cache, 6)
    assert torch.equal(greedy(model, longer, loaded, 6), second)
    assert loaded.nbytes == cache.nbytes
    plain = VQCache(model.config, window=8)
    assert torch.equal(step_by_step(model, ids, plain, 4), first)
    assert torch.equal(step_by_step(model, longer, plain, 6), second)


@pytest.mark.parametrize("name", SIX)
def test_chunked_prefill(name: str) -> None:
    """Chunks within the window read what single tokens read; without codes, what floats do."""
    model = build(name)
    ids = prompt(24)
    chunked = greedy(model, ids, VQCache(model.config, window=8), 6, prefill_chunk_size=5)
    single = VQCache(model.config, window=8)
    assert torch.equal(step_by_step(model, ids, single, 6, chunk=1), chunked)
    exact = greedy(model, ids, VQCache(model.config, window=300), 6, prefill_chunk_size=5)
    assert torch.equal(exact, greedy(model, ids, None, 6))


def test_grad_and_inference_modes() -> None:
    model = build("gqa")
    ids = prompt(36)
    parts = [ids[:, :30], *ids[:, 30:].split(1, 1)]

    def run(cache: VQCache, *modes: Any) -> Tensor:
        logits = []
        for index, part in enumerate(parts):
            with modes[min(index, len(modes) - 1)]():
                logits.append(model(part, past_key_values=cache).logits)
        return torch.cat(logits, 1)

    codebooks.universal.cache_clear()
    inference, graded = torch.inference_mode, torch.enable_grad
    cache = VQCache(model.config, window=8, strict=True)
    mixed = run(cache, inference, inference, inference, torch.no_grad)
    assert set(cache.fallbacks.values()) == {0}
    wanted = run(VQCache(model.config, window=8), torch.no_grad)
    assert torch.equal(mixed, wanted)
    cache = VQCache(model.config, window=8)
    logits = run(cache, graded)
    assert (logits - wanted).abs().max() < 1e-4  # another order of sums
    assert not any(
        held.requires_grad for held in (cache.layers[1].k.tail.data, cache.layers[1].k.sinks)
    )
    logits[:, -1].sum().backward()  # through the keys of the last update
    assert model.model.layers[1].self_attn.k_proj.weight.grad.abs().max() > 0
    with pytest.raises(VQCacheError, match=r"gradients are enabled.*torch.no_grad\(\)"):
        run(VQCache(model.config, strict=True), graded)


def test_autocast() -> None:
    model = build("gqa")
    ids = prompt(30)
    logits = []
    for cache in (VQCache(model.config, window=8, strict=True), DynamicCache(config=model.config)):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            for part in (ids[:, :20], *ids[:, 20:].split(5, 1)):
                last = model(part, past_key_values=cache).logits
        logits.append(last.float().log_softmax(-1))
    assert (logits[0] - logits[1]).abs().mean() < 0.1 * logits[1].std()


def test_encoder_decoder() -> None:
    fields = {"d_model": 32, "vocab_size": 96, "pad_token_id": 0, "decoder_start_token_id": 2}
    for side in ("encoder", "decoder"):
        fields |= {f"{side}_layers": 2, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 32}
    config = transformers.BartConfig(**fields)
    model = transformers.BartForConditionalGeneration(config).eval()
    ids, decoder = prompt(12), prompt(20)
    run = lambda cache: greedy(model, ids, cache, 4, decoder_input_ids=decoder)  # noqa: E731
    with pytest.raises(VQCacheError, match=r"EncoderDecoderCache\(VQCache"):
        run(VQCache(config))
    both = []
    for cross in (DynamicCache(config=config), VQCache(config, window=30)):
        own = VQCache(config, window=4)
        both.append(run(EncoderDecoderCache(own, cross)))
        assert own.get_seq_length() == 24 and set(own.fallbacks.values()) == {0}
    assert torch.equal(*both) and min(cross.fallbacks.values()) > 0


def test_cache_implementation(tmp_path: Path) -> None:
    model = build("gemma3")  # Transformers' own quantized cache refuses sliding layers
    ids = prompt(30)
    wanted = greedy(model, ids, VQCache(model.config, "u2", window=8))
    options = {"backend": "vq", "scheme": "u2", "window": 8}
    kinds_of_cache = {"cache_implementation": "quantized", "return_dict_in_generate": True}
    for _ in range(2):  # the options must not be consumed
        out = greedy(model, ids, cache_config=options, **kinds_of_cache)
        assert isinstance(out.past_key_values, VQCache)
        assert torch.equal(out.sequences, wanted)
    model.generation_config.cache_implementation = "quantized"
    model.generation_config.cache_config = options
    model.generation_config.save_pretrained(tmp_path)
    model.generation_config = transformers.GenerationConfig.from_pretrained(tmp_path)
    assert torch.equal(greedy(model, ids), wanted)
    for wrong, message in (
        ({"nbits": 4}, r"unknown keys \['nbits'\]"), ({"window": "8"}, "window"),
        ({"key_means": None}, "key_means"),
    ):  # fmt: skip
        with pytest.raises(VQCacheError, match=message):
            greedy(model, ids, cache_config={"backend": "vq", **wrong}, **kinds_of_cache)
    with pytest.raises(ValueError, match="Unknown quantization backend `nope`"):
        greedy(model, ids, cache_config={"backend": "nope"}, **kinds_of_cache)


def test_other_caches_are_left_alone() -> None:
    prepare = generation.tell_the_prompt(lambda *args, **kwargs: "as before")
    options = {"backend": "quanto"}
    config = SimpleNamespace(cache_config=options)
    assert prepare(None, config, {}) == "as before" and config.cache_config is options
    assert prepare(None, SimpleNamespace(), {}) == "as before"


def test_strict_names_the_cure() -> None:
    model = build("gqa", "eager")
    with decoded(), pytest.raises(VQCacheError, match='set_attn_implementation\\("vq"\\)'):
        greedy(model, prompt(30), VQCache(model.config, strict=True))


def test_no_layer_to_code() -> None:
    config = transformers.MistralConfig(num_hidden_layers=2, sliding_window=8)
    with pytest.warns(UserWarning, match="quantize_sliding=True"):
        VQCache(config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_embedded_model(tinybooks: Path, root: Path, dtype: torch.dtype) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tinybooks, dtype=dtype)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tinybooks)
    text = (root / "tests" / "models" / "tinybooks-5m-eval.txt").read_text()
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :120]
    error = {}
    for scheme in ("u4", "u2"):
        caches = [
            DynamicCache(config=model.config),
            VQCache(model.config, scheme, window=16, strict=True),
        ]
        with torch.no_grad():
            parts = [ids[:, :100], *ids[:, 100:].split(1, 1)]
            logits = [
                torch.cat([model(part, past_key_values=cache).logits for part in parts], 1)
                for cache in caches
            ]
        exact, coded = (x[:, 100:].float().log_softmax(-1) for x in logits)
        assert torch.equal(logits[0][:, :100], logits[1][:, :100])
        error[scheme] = (exact.exp() * (exact - coded)).sum(-1).mean().item()
    assert 0 < error["u4"] < error["u2"] < 0.2
    assert isinstance(caches[1].layers[0].keys, LazyKV)
