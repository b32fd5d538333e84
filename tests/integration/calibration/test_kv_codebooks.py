"""Calibration of a KV cache: what is recorded, of which models, and what is refused."""

import dataclasses
import json
import math

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import hf_vq
from hf_vq import (
    KVScheme,
    VQCache,
    VQCacheError,
    VQCalibrationError,
    VQFormatError,
    VQSchemeError,
)
from hf_vq.cache.codebooks import SINKS, KVCodebooks
from hf_vq.calibration import kv_codebooks as calibrate
from hf_vq.calibration.kv_codebooks import calibrate_kv
from hf_vq.calibration.text import sample_text, spread
from hf_vq.fit.kv import fit_kv_codebook
from hf_vq.formats import KV_SCHEMES
from hf_vq.transforms.key_smoothing import key_smoothing, squares
from hf_vq.transforms.smoothing import partners
from tests.fixtures.tiny_models import CONFIGS

SMALL = {"tokens": 160, "context": 32, "progress": False}


@pytest.fixture
def load(dense):
    return lambda name: AutoModelForCausalLM.from_pretrained(dense(name))


def text(count=400, seed=0):
    return torch.randint(3, 96, (count,), generator=torch.Generator().manual_seed(seed))


def exact_states(model, ids, sinks=SINKS):
    """Keys and values of every layer without the sinks, by the cache that the model makes."""
    layers = {}
    with torch.no_grad():
        for row in ids:
            cache = DynamicCache(config=model.config)
            model(row[None], past_key_values=cache)
            for index, layer in enumerate(cache.layers):
                layers.setdefault(index, []).append(
                    (layer.keys[0, :, sinks:], layer.values[0, :, sinks:])
                )
    return {
        index: [torch.cat(side, 1) for side in zip(*parts, strict=True)]
        for index, parts in layers.items()
    }


@pytest.mark.parametrize("scheme", ["nomad-4", "nomad-1"])
def test_codebooks_are_those_of_the_keys_after_rope(load, scheme):
    """Fitted by hand from the keys in a plain cache, they are the same numbers."""
    model = load("llama")
    ids = text(160).reshape(5, 32)
    found = calibrate_kv(model, scheme, ids, seed=3, **SMALL)
    assert isinstance(found, KVCodebooks) and found.scheme == KV_SCHEMES[scheme]
    assert found.values == [None, None] and found.key_means == [None, None]
    for layer, (keys, _) in exact_states(model, ids).items():
        assert torch.equal(found.keys[layer], fit_kv_codebook(keys, found.scheme.key, seed=3))


@pytest.mark.parametrize("sinks", [0, 7])
def test_sinks_are_those_of_the_cache(load, sinks, tmp_path, recwarn):
    """First tokens that a cache codes are learned of; a cache of codebooks without them is told."""
    model = load("llama")
    ids = text(160).reshape(5, 32)
    calibrate_kv(model, "nomad-4", ids, sinks=sinks, **SMALL).save(tmp_path / "books")
    found = KVCodebooks.load(tmp_path / "books")
    assert found.sinks == sinks
    for layer, (keys, _) in exact_states(model, ids, sinks).items():
        assert torch.equal(found.keys[layer], fit_kv_codebook(keys, found.scheme.key))
    cache = VQCache(model.config, "nomad-4", sinks=sinks, codebooks=found)
    model(ids[:1], past_key_values=cache)
    cache.save(tmp_path / "cache")
    assert VQCache.load(tmp_path / "cache", model.config).codebooks.sinks == sinks
    assert not recwarn
    if sinks:
        with pytest.warns(UserWarning, match="first 7 tokens.*--sinks 0"):
            VQCache(model.config, "nomad-4", sinks=0, codebooks=found)


def test_values_and_means(load):
    """A scheme of one's own: keys centred, both sides learned."""
    learned = KV_SCHEMES["nomad-2"].key
    scheme = KVScheme(learned, learned, centre_keys=True)
    model = load("qwen3")
    ids = text(160).reshape(5, 32)
    found = calibrate_kv(model, scheme, ids, **SMALL)
    for layer, (keys, values) in exact_states(model, ids).items():
        mean = keys.mean(1)
        torch.testing.assert_close(found.key_means[layer], mean, atol=1e-5, rtol=1e-5)
        centred = keys - found.key_means[layer][:, None]
        assert torch.equal(found.keys[layer], fit_kv_codebook(centred, learned))
        assert torch.equal(found.values[layer], fit_kv_codebook(values, learned))


def test_universal_schemes_get_means_only(load):
    model = load("llama")
    ids = text(160).reshape(5, 32)
    found = calibrate_kv(model, "u4", ids, **SMALL)
    assert found.keys == found.values == [None, None]
    for layer, (keys, _) in exact_states(model, ids).items():
        mean, turning = found.key_means[layer], (found.key_rotary_means or [None] * 2)[layer]
        assert mean.dtype == torch.float32
        stands = torch.ones_like(mean, dtype=torch.bool) if turning is None else turning == 0
        assert stands.any() and not mean[~stands].any()
        torch.testing.assert_close(mean[stands], keys.mean(1)[stands], atol=1e-5, rtol=1e-5)


def test_smoothing_is_that_of_queries_and_keys(load, tmp_path):
    """Computed again from all keys and queries of the text at once; a file keeps it."""
    model, ids = load("llama"), text(160).reshape(5, 32)
    for layer in model.model.layers:  # queries are larger in half of the pairs
        attention = layer.self_attn
        weight = attention.q_proj.weight.data
        weight.unflatten(0, (-1, 2, attention.head_dim // 2))[:, :, ::2] *= 8
    queries: dict[int, list[torch.Tensor]] = {}

    def recorded(module, query, key, value, mask, **options):
        queries.setdefault(module.layer_idx, []).append(query[:, :, 4:])
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    found = calibrate_kv(model, "u4", ids, **SMALL)
    assert all(part is not None for part in found.key_smoothings)
    AttentionInterface.register("recorded", recorded)
    model.set_attn_implementation("recorded")
    for layer, (keys, _) in exact_states(model, ids).items():
        query, heads = torch.cat(queries[layer], 2), len(keys)
        turning = (found.key_rotary_means or [None] * 2)[layer]
        means = found.key_means[layer].square()
        means = means if turning is None else means + turning.square()
        dim = keys.shape[-1]
        wanted = key_smoothing(
            squares(query, heads), squares(keys[None], heads), means[None, :, None],
            partners(dim, dim, "half"),
        )  # fmt: skip
        torch.testing.assert_close(found.key_smoothings[layer], wanted[0, :, 0], rtol=1e-3, atol=0)
    found.save(tmp_path / "books")
    again = KVCodebooks.load(tmp_path / "books")
    with safe_open(tmp_path / "books", "pt") as file:
        assert json.loads(file.metadata()["hf_vq_kv"])["format_version"] == 3
    for one, other in zip(found.key_smoothings, again.key_smoothings, strict=True):
        assert torch.equal(one, other)
    for wrong, message in (
        (found.key_smoothings[0][:1], "smoothing of the keys of u4 must be float32"),
        (found.key_smoothings[0] * 1e3, "is not between"),
        (found.key_smoothings[0] * math.nan, "is not between"),
    ):
        with pytest.raises(VQFormatError, match=message):
            dataclasses.replace(found, key_smoothings=[wrong, None])


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_model_with_a_cache(load, name, tmp_path):
    """And a cache with what was learned generates."""
    model = load(name)
    found = calibrate_kv(model, "nomad-4", text(), **SMALL)
    assert len(found) == 2 and all(key is not None for key in found.keys)
    found.save(tmp_path / "kv_codebooks.safetensors")
    again = KVCodebooks.load(tmp_path / "kv_codebooks.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(found.keys, again.keys, strict=True))
    if name == "gemma3":  # its layers slide
        return
    cache = VQCache(model.config, "nomad-4", window=4, codebooks=again)
    out = model.generate(text(20)[None], max_new_tokens=4, do_sample=False, past_key_values=cache)
    assert out.shape[1] > 20 and cache.get_seq_length() >= 20


def test_layers_without_keys_have_none():
    """A model of attention and state-space layers."""
    config = FalconH1Config(
        vocab_size=96, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, mamba_d_ssm=32, mamba_n_heads=2,
        mamba_d_head=16, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=16,
    )  # fmt: skip
    found = calibrate_kv(FalconH1ForCausalLM(config), "nomad-4", text(), **SMALL)
    assert [None if key is None else list(key.shape) for key in found.keys] == [[1, 16, 16, 1]] * 2


def test_quantized_models_and_every_dtype(quantized):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = AutoModelForCausalLM.from_pretrained(quantized(), dtype=dtype)
        found = calibrate_kv(model, "nomad-2", text(), **SMALL)
        assert found.keys[1].isfinite().all()


def test_equal_arguments_give_equal_codebooks(load):
    model = load("llama")
    options = {**SMALL, "samples": 128}

    def keys(seed, **more):
        return calibrate_kv(model, "nomad-2", seed=seed, **{**options, **more}).keys[1]

    assert torch.equal(keys(0), keys(0))
    assert not torch.equal(keys(0), keys(1))
    state = torch.random.get_rng_state()
    keys(5)
    assert torch.equal(torch.random.get_rng_state(), state), "the global generator is left alone"


def test_the_model_is_left_as_it_was(load):
    model = load("llama").train()
    calibrate_kv(model, "u4", text(), **SMALL)
    assert model.training
    with pytest.raises(VQCalibrationError):
        calibrate_kv(model, "u4", text(20), **SMALL)
    assert model.training
    before = {name: p.clone() for name, p in model.named_parameters()}
    calibrate_kv(model.eval(), "nomad-4", None, **SMALL)
    assert not model.training and all(
        torch.equal(p, before[n]) for n, p in model.named_parameters()
    )


def test_memory_is_bounded_by_samples(load, monkeypatch):
    seen = []
    fit = calibrate.fit_kv_codebook
    monkeypatch.setattr(
        calibrate, "fit_kv_codebook", lambda x, *a, **k: seen.append(x.shape) or fit(x, *a, **k)
    )
    calibrate_kv(load("llama"), "nomad-4", text(), samples=128, tokens=320, context=64)
    assert seen == [(2, 128, 16)] * 2
    calibrate_kv(load("llama"), "nomad-4", text(), **SMALL)
    assert seen[2:] == [(2, 5 * (32 - SINKS), 16)] * 2


def test_a_string_needs_a_tokenizer(load):
    class Tokenizer:
        def __call__(self, text, **options):
            assert options["add_special_tokens"] is False
            return type("Encoding", (), {"input_ids": [3 + ord(c) % 90 for c in text]})

    model = load("llama")
    words = "It was the best of times, it was the worst of times. " * 8
    found = calibrate_kv(model, "nomad-4", words, Tokenizer(), **SMALL)
    same = calibrate_kv(
        model, "nomad-4", Tokenizer()(words, add_special_tokens=False).input_ids, **SMALL
    )
    assert torch.equal(found.keys[0], same.keys[0])
    with pytest.raises(VQCalibrationError, match="needs a tokenizer"):
        calibrate_kv(model, "nomad-4", words, **SMALL)


def test_pieces_are_spread_over_the_text(load, monkeypatch):
    seen = []
    run = calibrate.run_recorded
    monkeypatch.setattr(
        calibrate, "run_recorded", lambda m, ids, *r: seen.append(ids) or run(m, ids, *r)
    )
    ids = text(1000)
    calibrate_kv(load("llama"), "u4", ids, tokens=100, context=32, progress=False)
    assert len(seen) == 3 and all(len(piece) == 32 for piece in seen)
    assert torch.equal(seen[0], ids[:32]) and torch.equal(seen[2], ids[-32:])
    assert torch.equal(seen[1], ids[484:516])
    seen.clear()
    calibrate_kv(load("llama"), "u4", ids.reshape(10, 100), tokens=64, context=20, progress=False)
    assert [piece.tolist() for piece in seen] == [ids[i * 100 :][:20].tolist() for i in (0, 4, 9)]
    assert spread(5, 1).tolist() == [0] and spread(7, 7).tolist() == list(range(7))


def test_text_that_the_model_writes(load):
    model = load("llama")
    ids = sample_text(model, 3, 12, seed=2)
    assert ids.shape == (3, 12) and (ids[:, 0] == model.config.bos_token_id).all()
    assert torch.equal(ids, sample_text(model, 3, 12, seed=2))
    assert not torch.equal(ids, sample_text(model, 3, 12, seed=3))
    with torch.no_grad():  # each token was drawn where it had a chance
        chances = model(ids).logits.softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])
    assert (chances > 0).all()
    model.generation_config.bos_token_id = model.config.bos_token_id = None
    model.generation_config.eos_token_id = [5, 6]
    assert (sample_text(model, 1, 2)[:, 0] == 5).all()
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    with pytest.raises(VQCalibrationError, match="give it a text"):
        sample_text(model, 1, 2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scheme": "nomad-3"}, VQSchemeError, "Did you mean 'nomad-"),
        ({"text": text(100)}, VQCalibrationError, "too short: 100 tokens of at least 160"),
        ({"text": text(100).reshape(10, 10)}, VQCalibrationError, "too short"),
        ({"text": torch.randn(400)}, VQCalibrationError, "integer token ids"),
        ({"text": text(400).reshape(1, 4, 100)}, VQCalibrationError, "integer token ids"),
        ({"tokens": 127}, VQCacheError, "tokens=...\\) must be at least 128; got 127"),
        ({"tokens": True}, VQCacheError, "tokens"),
        ({"scheme": "cq-4"}, VQCacheError, "tokens=...\\) must be at least 2048; got 160"),
        ({"samples": 100}, VQCacheError, "samples=...\\) must be at least 128"),
        ({"sinks": -1}, VQCacheError, "sinks=...\\) must be at least 0; got -1"),
        ({"sinks": 16}, VQCacheError, "sinks=16. leaves out most of a sequence of 32 tokens"),
        (
            {"sinks": 8, "text": text(160).reshape(10, 16)},
            VQCacheError,
            "most of a sequence of 16 tokens",
        ),
        ({"context": 8}, VQCacheError, "context=...\\) must be at least 16"),
        ({"context": 65}, VQCalibrationError, "context=65 is more than the 64 tokens"),
        (
            {"scheme": KVScheme(KV_SCHEMES["u4"].key, KV_SCHEMES["u4"].value, centre_keys=False)},
            VQCacheError,
            "nothing to calibrate",
        ),
    ],
)
def test_wrong_arguments(load, options, error, message):
    with pytest.raises(error, match=message):
        calibrate_kv(load("llama"), **{"text": text(), **SMALL, **options})


@pytest.mark.parametrize("given", [None, "text"])
def test_models_without_a_cache_of_keys(given):
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1}
    t5 = T5Config(vocab_size=96, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    bert = BertConfig(**sizes, num_attention_heads=2, intermediate_size=32)
    models = [
        MambaForCausalLM(MambaConfig(**sizes, state_size=4)),
        T5ForConditionalGeneration(t5),
        BertForMaskedLM(bert),
        torch.nn.Linear(2, 2),
    ]
    for model in models:
        with pytest.raises(VQCacheError, match=f"{type(model).__name__} is no decoder-only model"):
            calibrate_kv(model, "nomad-4", given and text(), **SMALL)


def test_a_head_dim_that_does_not_divide():
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, head_dim=18,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with pytest.raises(VQSchemeError, match="divisible by 4; layer 0, keys has 18"):
        calibrate_kv(model, "nomad-1", text(), **SMALL)
    assert calibrate_kv(model, "nomad-2", text(), **SMALL).keys[0].shape == (2, 9, 16, 2)


@pytest.mark.parametrize("scheme", ["u4", "nomad-4"])
def test_keys_that_are_not_finite(load, scheme):
    model = load("llama")
    model.model.layers[1].self_attn.k_proj.weight.data[3] = torch.nan
    with pytest.raises(VQCacheError, match=r"layer 1.* NaN"):
        calibrate_kv(model, scheme, text(), **SMALL)


def test_it_is_public():
    assert hf_vq.calibrate_kv is calibrate_kv and "calibrate_kv" in hf_vq.__all__
