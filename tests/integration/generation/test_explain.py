"""`hf_vq.explain` of a cache: what its layers ask of the dispatch table."""

import re

import torch
from transformers import AutoModelForCausalLM

from hf_vq import VQCache, dispatch, explain
from hf_vq.formats import kv_scheme
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
    assert re.search(r"attention +32 x 16", str(explain(model, cache=cache)))


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
