"""Bits of a KV cache for each layer: what is measured, chosen, saved and found again."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_vq
from hf_vq import VQCache, VQCacheError, VQCalibrationError, allocate_kv
from hf_vq.cache.codebooks import FILE_NAME, KVCodebooks
from hf_vq.calibration import kv_allocation as module
from hf_vq.formats import KV_SCHEMES
from tests.fixtures.tiny_models import tokens

SMALL = {"tokens": 64, "context": 64, "progress": False}


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    """Models of 64 tokens have something outside of the window."""
    monkeypatch.setattr(module, "WINDOW", 8)


@pytest.fixture
def model(dense):
    """Keys of layer 1 matter most: its queries are large."""
    model = AutoModelForCausalLM.from_pretrained(dense("llama"))
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.mul_(6)
        model.model.layers[0].self_attn.o_proj.weight.mul_(0.01)
    return model


def text():
    return torch.randint(3, 96, (300,), generator=torch.Generator().manual_seed(0))


def bits(scheme):
    return [4 * 2 * part.entry_bits // part.vector_size // 8 for part in (scheme.key, scheme.value)]


def test_bits_go_where_they_are_needed(model, tmp_path):
    found = allocate_kv(model, text(), target_bits=3, **SMALL)
    (k0, v0), (k1, v1) = found.sensitivity
    assert k1 > 10 * k0 and v1 > 10 * v0
    chosen = [bits(scheme) for scheme in found.scheme]
    assert sum(map(sum, chosen)) == 4 * 3 and chosen[1] == [4, 4] and chosen[0] == [2, 2]
    assert all(scheme.centre_keys for scheme in found.scheme)
    assert [mean.shape for mean in found.key_means] == [(2, 16)] * 2

    model.save_pretrained(tmp_path)
    found.save(tmp_path / FILE_NAME)
    loaded = KVCodebooks.load(tmp_path / FILE_NAME)
    assert loaded.scheme == found.scheme and loaded.sensitivity == found.sensitivity
    cache = VQCache.from_pretrained(tmp_path, window=8)
    assert [layer.scheme for layer in cache.layers] == list(found.scheme)
    out = model.generate(tokens(2, 30), max_new_tokens=4, do_sample=False, past_key_values=cache)
    assert out.shape == (2, 34) and cache.bits_per_element == 3 + 16 / 16
    assert torch.equal(cache.layers[1].k.mean[0, :, 0], found.key_means[1])

    cache.save(tmp_path / "prompt")
    again = VQCache.load(tmp_path / "prompt", model.config)
    assert again.options.scheme == found.scheme
    assert torch.equal(again.layers[0].keys + 0, cache.layers[0].keys + 0)


def test_it_costs_less_than_the_same_bits_everywhere(model):
    """Measured as generation reads a cache, on other text than the allocation's."""
    found = allocate_kv(model, text(), target_bits=3, **SMALL)
    ids = tokens(1, 60)

    def divergence(schemes):
        with torch.no_grad():
            wanted = model(ids).logits
            return module._divergence(model, ids, wanted, schemes, found.key_means)

    assert divergence(found.scheme) < 0.7 * divergence((KV_SCHEMES["u3"],) * 2)


def test_a_list_of_names(model):
    """As a saved generation config holds it."""
    config = {"backend": "vq", "scheme": ["u2", "k4v2"], "window": 8}
    hf_vq.enable_cache_backend()
    out = model.generate(
        tokens(1, 20), max_new_tokens=3, do_sample=False, cache_implementation="quantized",
        cache_config=config, return_dict_in_generate=True,
    )  # fmt: skip
    cache = out.past_key_values
    assert [layer.scheme for layer in cache.layers] == [KV_SCHEMES["u2"], KV_SCHEMES["k4v2"]]
    assert "one scheme for each of 2 layers" in repr(cache)
    names = {layer: row.problem.key_scheme for row in hf_vq.explain(model, cache=cache)
             for layer in row.layers if row.problem.op == "kv_attention"}  # fmt: skip
    assert names["cache.layers.0"] != names["cache.layers.1"]


def test_layers_that_are_not_coded_get_no_bits(dense):
    gemma = AutoModelForCausalLM.from_pretrained(dense("gpt-oss"))
    found = allocate_kv(gemma, text(), target_bits=2.5, **SMALL)
    sliding = gemma.config.layer_types.index("sliding_attention")
    assert found.sensitivity[sliding] == [] and len(found.sensitivity[1 - sliding]) == 2
    assert sum(bits(found.scheme[1 - sliding])) == 5


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"target_bits": 1.5}, VQCacheError, "target_bits=...\\) must be from 2 to 4; got 1.5"),
        ({"target_bits": True}, VQCacheError, "target_bits"),
        ({"tokens": 4000}, VQCalibrationError, "the text is too short"),
        ({"tokens": 15}, VQCacheError, "tokens=...\\) must be at least 16"),
        (
            {"context": 16, "tokens": 64, "window": 16},
            VQCalibrationError,
            "leaves the window of 16",
        ),
    ],
)
def test_wrong_arguments(model, monkeypatch, options, error, message):
    monkeypatch.setattr(module, "WINDOW", options.pop("window", 8))
    with pytest.raises(error, match=message):
        allocate_kv(model, text(), **{**SMALL, **options})


def test_keys_and_logits_that_are_not_finite(model):
    model.lm_head.weight.data[5] = torch.nan
    with pytest.raises(VQCalibrationError, match="predicts NaN"):
        allocate_kv(model, text(), **SMALL)
    model.model.layers[1].self_attn.k_proj.weight.data[3] = torch.nan
    with pytest.raises(VQCacheError, match=r"layer 1.* NaN"):
        allocate_kv(model, text(), **SMALL)


def test_another_number_of_layers(model):
    with pytest.raises(VQCacheError, match="lists 3 schemes; the model has 2 layers"):
        VQCache(model.config, ["u4", "u3", "u2"])
    mixed = KV_SCHEMES["u4"], replace(KV_SCHEMES["u4"], key=KV_SCHEMES["u3"].key)
    with pytest.raises(VQCacheError, match="codebooks are of one scheme for each of 2 layers"):
        VQCache(
            model.config, codebooks=KVCodebooks(mixed, *[[None] * 2] * 2, [torch.zeros(2, 16)] * 2)
        )


def test_it_is_public():
    assert hf_vq.allocate_kv is allocate_kv and "allocate_kv" in hf_vq.__all__
