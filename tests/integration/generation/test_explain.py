"""`hf_vq.explain` of a cache: what its layers ask of the dispatch table."""

import re
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import hf_vq
from hf_vq import VQCache, VQConfig, dispatch, explain
from hf_vq.backends.cpu import library
from hf_vq.dispatch import Entry, Implementation
from hf_vq.formats import kv_scheme
from hf_vq.formats.catalog import weight_scheme
from tests.fixtures.tiny_models import CONFIGS


def model_of(name):
    return AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()


def test_an_empty_cache_and_one_with_tokens(monkeypatch):
    model = model_of("llama")
    cache = VQCache(model.config, "k4v2", window=8)
    key, value = (part.spec() for part in (kv_scheme("k4v2").key, kv_scheme("k4v2").value))
    row, *others = explain(model, cache=cache)
    assert row.layers == ("cache.layers.0", "cache.layers.1")
    assert row.problem[:8] == ("cpu", "float32", key, value, 1, 1, 16, 16)
    assert isinstance(row.problem, dispatch.KVAttentionProblem)
    appended = {each.problem.key_scheme: each.problem for each in others}
    assert set(appended) == {key, value}
    assert appended[key].num_new == 1

    chosen = set()
    asks = {name: getattr(dispatch, name) for name in ("select", "bind")}

    def recording(ask):
        return lambda problem: chosen.add(problem) or ask(problem)

    with torch.no_grad():
        model(torch.randint(3, 96, (1, 30)), past_key_values=cache)
        for name, ask in asks.items():
            monkeypatch.setattr(dispatch, name, recording(ask))
        model(torch.randint(3, 96, (1, 1)), past_key_values=cache)
        monkeypatch.undo()
    asked = {row.problem for row in explain(model, cache=cache)}
    assert asked == {problem for problem in chosen if problem.op in ("kv_attention", "kv_append")}
    assert re.search(r"\(kv_attention, 32 x 16\)", str(explain(model, cache=cache)))


def test_layers_that_are_not_coded_ask_nothing():
    model = model_of("gpt-oss")  # every other layer slides
    rows = explain(model, cache=VQCache(model.config))
    assert {row.layers for row in rows} == {("cache.layers.1",)}
    both = explain(model, cache=VQCache(model.config, quantize_sliding=True))
    assert {row.layers for row in both} == {("cache.layers.0", "cache.layers.1")}
    long = VQCache(model.config, quantize_sliding=True, max_cache_len=1000)
    sizes = {
        row.problem.length: row.layers
        for row in explain(model, cache=long)
        if row.problem.op == "kv_attention"
    }
    assert sizes == {1: ("cache.layers.0",), 1024: ("cache.layers.1",)}


DECODED = "vq4x5r1-tensor-g0-none"  # no kernel of a CPU multiplies with its codes
ADDED = "vq1x4+2r2-universal-g128-hadamard128-shared"  # two products


def quantized(scheme):
    layers = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 128))
    return hf_vq.quantize_model(layers, hf_vq.VQConfig(scheme, activations=None))


def test_layers_that_are_slower_than_dense_ones_are_said_once(caplog, monkeypatch):
    monkeypatch.setattr(sys.modules["hf_vq.hf.explain"], "_warned", set())
    decodes = Entry("mine", "linear", Implementation(lambda: None, is_slow=of_three))
    others = [entry for entry in dispatch.ENTRIES if entry.op != "linear"]
    with dispatch.using([decodes, *others]), caplog.at_level("WARNING", "hf_vq"):
        model = quantized("turboquant-3")
        quantized("turboquant-3")
        quantized("vq-4")
        summary = explain(model).summary
        long = explain(model, tokens=64).summary
    assert summary == (
        "2 of 2 layers take longer than dense ones on cpu: turboquant-3. vq-3 would not."
    )
    assert [record.getMessage() for record in caplog.records] == [f"hf_vq: {summary}"]
    assert long == "All 2 layers run on their codes."
    assert str(explain(model)).splitlines()[0] == explain(model).summary
    assert explain(torch.nn.Linear(2, 2)).summary == "No layer holds codes."


def test_inputs_that_keep_16_bits_are_said_once(caplog, monkeypatch):
    monkeypatch.setattr(sys.modules["hf_vq.hf.explain"], "_warned", set())

    def eight(bits):
        layers = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(128, 128))
        config = hf_vq.VQConfig("vq-4", activations=None, activations_bits=bits)
        return hf_vq.quantize_model(layers, config)

    with caplog.at_level("WARNING", "hf_vq"):
        eight(16)
        assert not caplog.records
        eight(8)
        eight(8)
    (record,) = caplog.records
    assert record.getMessage() == (
        "hf_vq: activations_bits=8 changes nothing in 2 of 2 layers: tensor is on cpu."
    )
    rounds = Entry("cuda.int8_linear", "linear", Implementation(lambda: None, narrow))
    others = [entry for entry in dispatch.ENTRIES if entry.name != rounds.name]
    caplog.clear()
    with dispatch.using([rounds, *others]), caplog.at_level("WARNING", "hf_vq"):
        eight(8)
    assert "changes nothing in 1 of 2 layers: 256 is too wide." in caplog.text


def narrow(problem):
    return f"{problem.in_features} is too wide" if problem.in_features > 128 else None


def of_three(problem):
    return problem.scheme == weight_scheme("turboquant-3").spec()


def test_which_entries_are_slow():
    """The reference always, two passes by their slowest, CPU codes without a fast kernel."""
    wide = library.isa() in ("avx512", "zen4")
    cases = (("vq-4", False), ("turboquant-2+2", False), ("turboquant-3", False), (DECODED, True))
    for scheme, slow in (*cases, ("turboquant-8", not wide), ("turboquant-4+4", not wide)):
        slow |= library.load() is None  # built without: the reference runs all
        assert {row.is_slow for row in explain(quantized(scheme))} == {slow}, scheme


def test_a_sentence_of_a_layer_is_about_this_machine(monkeypatch):
    said = str(explain(quantized(DECODED))).splitlines()
    assert len(said) == 4 and not said[1]
    assert f"runs 0 (linear, {DECODED}, 256 x 256); " in said[2]
    assert all("cuda" not in line and "xpu" not in line for line in said[2:])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "cuda.linear does not: tensor is on cpu" in str(explain(quantized(ADDED)))
    if library.load() is not None:
        monkeypatch.undo()
        said = str(explain(quantized("turboquant-4"))).splitlines()
        assert said[2:] == [
            "cpu.linear runs 0 (linear, turboquant-4, 256 x 256).",
            "cpu.linear runs 1 (linear, turboquant-4, 128 x 256).",
        ]


@pytest.mark.skipif(library.load() is None, reason=library.why_not())
def test_a_scheme_that_another_one_outruns_on_this_processor():
    wide = library.isa() in ("avx512", "zen4")
    said = str(explain(quantized("vq-4"))).splitlines()[2]
    assert said.startswith("cpu.linear runs 0 (linear, vq-4, 256 x 256)")
    assert ("turboquant-4" in said) != wide


def test_what_a_dense_head_costs():
    def model(**options):
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            vocab_size=512, tie_word_embeddings=options.pop("tied", True),
        )  # fmt: skip
        dense = AutoModelForCausalLM.from_config(config)
        return hf_vq.quantize_model(dense, VQConfig("vq-4", activations=None, **options))

    said = explain(model()).head
    assert said.startswith("output head: dense, 0.131 of the ") and 'embeddings="int8"' in said
    assert str(explain(model())).endswith(said)
    assert said.endswith("stores it in 0.0338.")
    assert explain(model(embeddings="int8")).head == ""
    said = explain(model(tied=False)).head
    assert 'VQConfig(layers={"lm_head": "turboquant-6"}) stores it in 0.0' in said
    coded = model(tied=False, layers={"lm_head": "turboquant-6"})
    size = sum(tensor.nbytes for tensor in coded.lm_head.parameters())
    assert explain(coded).head == "" and f" in {size / 1e6:.3g}." in said
    assert explain(model().to("meta")).head == ""
