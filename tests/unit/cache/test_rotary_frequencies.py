"""Frequencies of keys are those of Transformers' own models, for every kind of RoPE."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from hf_vq.cache.rotary import RopeFrequencies, inverse_frequencies
from tests.fixtures.generation import MLA, SMALL

LONG = {"rope_theta": 5e5, "original_max_position_embeddings": 32}
SHORT = [1.0 + i / 8 for i in range(8)]
FACTORS = {"short_factor": SHORT, "long_factor": [2 * x for x in SHORT]}
BANDS = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("qwen2", {"rope_type": "default", "rope_theta": 1e6}),
    "linear": ("llama", {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    "dynamic": ("llama", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}),
    "llama3": (
        "llama",
        {**LONG, **BANDS, "rope_type": "llama3"},
    ),
    "yarn": ("qwen3", {**LONG, "rope_type": "yarn", "factor": 4.0}),
    "longrope": ("phi3", {**LONG, **FACTORS, "rope_type": "longrope"}),
    "partial": ("glm", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
    "interleaved": ("cohere", {"rope_type": "default", "rope_theta": 8e6}),
}  # fmt: skip


def config_of(family: str, **options: Any) -> PreTrainedConfig:
    return CONFIG_MAPPING[family](**{**SMALL, **options})


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_those_of_the_model(kind: str) -> None:
    family, parameters = KINDS[kind]
    config = config_of(family, rope_parameters=dict(parameters))
    model = AutoModelForCausalLM.from_config(config)
    for length in (20, 300):  # dynamic and longrope have others for long prompts
        at = torch.arange(length)[None]
        model.model.rotary_emb(torch.zeros(1, length, 4), at)
        found = inverse_frequencies(model.config, 1, 16, length)
        assert found is not None and len(found) == (4 if kind == "partial" else 8)
        torch.testing.assert_close(found, model.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)


def test_layers_may_differ() -> None:
    sizes = {"full_attention": 1e6, "sliding_attention": 1e4}
    config = config_of(
        "gemma3_text", layer_types=list(sizes)[::-1],
        rope_parameters={k: {"rope_type": "default", "rope_theta": v} for k, v in sizes.items()},
    )  # fmt: skip
    rope = AutoModelForCausalLM.from_config(config).model.rotary_emb
    wanted: list[Tensor] = [rope.sliding_attention_inv_freq, rope.full_attention_inv_freq]
    for layer, each in enumerate(wanted):
        found = inverse_frequencies(config, layer, 16, 9)
        torch.testing.assert_close(found, each, rtol=1e-6, atol=0)


def test_none_where_keys_do_not_turn_or_nothing_says_how() -> None:
    smollm3 = config_of("smollm3", no_rope_layers=[1, 0])
    assert inverse_frequencies(smollm3, 0, 16, 9) is not None
    assert inverse_frequencies(smollm3, 1, 16, 9) is None
    deepseek = CONFIG_MAPPING["deepseek_v3"](**MLA)
    for config in (None, CONFIG_MAPPING["gpt2"](), deepseek, config_of("mpt"), config_of("gptj")):
        assert inverse_frequencies(config, 0, 16, 9) is None
    assert inverse_frequencies(smollm3, 0, 8, 9) is None  # more pairs than there are channels
    llama = config_of("llama")
    llama.rope_parameters = {"rope_type": "unheard of"}
    assert inverse_frequencies(llama, 0, 16, 9) is None


def test_layers_of_a_type_share_frequencies() -> None:
    """Made once for a type of layers and a length, and again for another length."""
    config = config_of("llama", head_dim=16)
    rope, keys = RopeFrequencies(config), torch.empty(1, 4, 9, 16)
    found = rope.of(0, keys)
    assert found is not None and torch.equal(found, inverse_frequencies(config, 0, 16, 9))
    assert rope.of(5, keys) is found and rope.of(0, keys[:, :, :3]) is not found
    assert copy.deepcopy(rope)._kept == {} and pickle.loads(pickle.dumps(rope))._kept == {}
    other = rope.of(0, torch.empty(1, 4, 9, 32))
    assert other is not None and len(other) == 8  # the config's, whatever the keys are
    assert RopeFrequencies().of(0, keys) is None


def test_layers_of_other_types_do_not_share() -> None:
    rope = RopeFrequencies(config_of("smollm3", no_rope_layers=[1, 0]))
    keys = torch.empty(1, 4, 9, 16)
    assert rope.of(1, keys) is None and rope.of(0, keys) is not None and rope.of(1, keys) is None
