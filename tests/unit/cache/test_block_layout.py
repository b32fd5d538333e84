"""A cache of several blocks is the cache it would be in rows, whatever is done to it."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

import hf_vq  # noqa: F401  generate tells the cache about the prompt
from hf_vq.cache import VQCache, attend, layer

pytestmark = pytest.mark.parametrize("layouts", ["blocks"], indirect=True)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a function on two caches; those that it starts are in blocks and in rows."""

    def run(function: Any, *caches: VQCache) -> list[Any]:
        result = [function(caches[0])]
        with monkeypatch.context() as patch:
            patch.setattr(layer, "layouts_for", lambda *arguments: ("rows", "rows"))
            return [*result, function(caches[1])]

    return run


def visible(cache: VQCache, query: Tensor, states: list[Tensor]) -> list[Tensor]:
    """Attention of every layer over an update."""
    outs = []
    for index in range(len(cache.layers)):
        key, value = cache.update(*states, index)
        out = attend(query, key, value)
        outs.append(query if out is None else out)
    return outs


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["u4", "u3", "nomad-u4", "k4v2"])
@pytest.mark.parametrize("sliding", [False, True])
def test_random_updates_crops_and_copies_are_those_of_rows(
    pair: Any, config: LlamaConfig, scheme: str, sliding: bool
) -> None:
    if sliding:
        config = Gemma3TextConfig(
            vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, sliding_window=280,
            layer_types=["sliding_attention", "full_attention"],
        )  # fmt: skip
    options = {"window": 16, "quantize_sliding": sliding}
    caches = [VQCache(config, scheme, **options) for _ in range(2)]
    for cache in caches:
        cache.expect_prompt((torch.arange(290) >= torch.tensor([[0], [9]])).int())
    batch = 2
    steps = ["update"] * 6 + ["crop", "rows", "copy"]
    for step in ["prompt", *random.choices(steps, k=16)]:
        if step in ("prompt", "update"):
            count = 290 if step == "prompt" else random.choice([1, 1, 1, 3, 40, 300])
            states = [torch.randn(batch, 2, count, 16) for _ in range(2)]
            query = torch.randn(batch, 4, count, 16)
            a, b = pair(lambda cache, q=query, s=states: visible(cache, q, s), *caches)
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        elif step == "crop" and not sliding:
            count = -random.choice([1, 15, 200])
            pair(lambda cache, n=count: cache.crop(n), *caches)
        elif step == "rows":
            index = torch.randint(0, batch, (random.randint(1, 3),))
            batch = len(index)
            pair(lambda cache, i=index: cache.batch_select_indices(i), *caches)
        elif step == "copy":
            caches = pair(copy.deepcopy, *caches)
        if caches[0].get_seq_length() == 0:
            break
        for x, y in zip(caches[0].layers, caches[1].layers, strict=True):
            assert {x.k.codes.layout, x.v.codes.layout} & {"quads", "planes"}
            assert (y.k.codes.layout, y.v.codes.layout) == ("rows", "rows")
            for one, other in ((x.k, y.k), (x.v, y.v)):
                assert torch.equal(one.codes.rows(), other.codes.rows())
                assert torch.equal(one.codes.scales(), other.codes.scales())
        assert caches[0].nbytes == caches[1].nbytes


def test_a_file_does_not_know(pair: Any, config: LlamaConfig, tmp_path: Path) -> None:
    caches = [VQCache(config, window=8) for _ in range(2)]
    states = [torch.randn(1, 2, 300, 16) for _ in range(2)]
    pair(lambda cache: visible(cache, states[0], states), *caches)
    paths = [tmp_path / "blocks", tmp_path / "rows"]
    for cache, path in zip(caches, paths, strict=True):
        cache.save(path)
    a, b = (load_file(path) for path in paths)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    loaded = VQCache.load(paths[1], config)
    assert loaded.layers[0].k.codes.layout == "quads"
    more = [torch.randn(1, 2, 1, 16) for _ in range(2)]
    query = torch.randn(1, 4, 1, 16)
    for a, b in zip(visible(caches[0], query, more), visible(loaded, query, more), strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 2},
        {"prompt_lookup_num_tokens": 3},
        {"prefill_chunk_size": 100},
        {"padded": True},
    ],
    ids=["greedy", "beams", "lookup", "chunks", "padded"],
)
def test_generate(pair: Any, config: LlamaConfig, options: dict[str, Any]) -> None:
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4.0)
    padded = options.pop("padded", False)
    ids = torch.randint(3, 31, (2 if padded else 1, 290))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :77] = 0

    def run(cache: VQCache) -> Tensor:
        tokens = model.generate(
            ids, attention_mask=mask, past_key_values=cache, max_new_tokens=12, do_sample=False,
            pad_token_id=0, eos_token_id=None, **options,
        )  # fmt: skip
        return torch.as_tensor(tokens)

    a, b = pair(run, *(VQCache(config, window=8, strict=True) for _ in range(2)))
    assert torch.equal(a, b)
