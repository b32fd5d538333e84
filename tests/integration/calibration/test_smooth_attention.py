"""SmoothAttention: the model computes the same with evener keys, or is refused."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    GPTJConfig,
    OPTConfig,
    PhiConfig,
    Qwen2Config,
)
from transformers.cache_utils import DynamicCache

import hf_vq
from hf_vq import VQCalibrationError, smooth_attention
from hf_vq.transforms import partners, smoothing_factors
from tests.fixtures.tiny_models import CONFIGS, tokens

SMALL = {"tokens": 128, "context": 32, "progress": False}
SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
MORE = {
    "biases": lambda: Qwen2Config(**SIZES, num_key_value_heads=2),
    "partial": lambda: PhiConfig(**SIZES, partial_rotary_factor=0.5),
    "interleaved": lambda: CohereConfig(**SIZES, num_key_value_heads=2),
    "interleaved, partial": lambda: GPTJConfig(
        vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=64, rotary_dim=8
    ),
    "no RoPE": lambda: OPTConfig(
        vocab_size=96, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, word_embed_proj_dim=64,
    ),
}  # fmt: skip
FOLDED = ("llama", "qwen3", *MORE)


def make(name, dtype=torch.float32):
    """A random model with channels of very different sizes in its keys."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config({**CONFIGS, **MORE}[name](), dtype=dtype).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
            if "k_proj" in key or "k_norm" in key:
                wide = torch.randn(len(parameter)).exp2().square().to(dtype)
                parameter.mul_(wide.reshape(-1, *[1] * (parameter.ndim - 1)))
    return model


def text():
    return torch.randint(3, 96, (300,), generator=torch.Generator().manual_seed(0))


def keys_of(model):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        logits = model(tokens(), past_key_values=cache).logits
    return logits, [layer.keys for layer in cache.layers]


@pytest.mark.parametrize("name", FOLDED)
def test_the_model_computes_the_same(name):
    """In float64 every sum is exact enough to tell a wrong pairing; powers of two change no bit."""
    model = make(name, torch.float64)
    before, keys = keys_of(model)
    factors = smooth_attention(model, text(), **SMALL)
    after, smoothed = keys_of(model)
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)
    assert sorted(factors) == [0, 1]
    for layer, (old, new) in enumerate(zip(keys, smoothed, strict=True)):
        assert torch.equal(new * factors[layer][:, None], old)
        spread, was = (states.abs().amax((0, 1, 2)) for states in (new, old))
        assert (spread.max() / spread.mean()) < (was.max() / was.mean())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gpt-oss"])
def test_every_dtype_to_the_bit(name, dtype):
    model = make(name, dtype)
    before, _ = keys_of(model)
    smooth_attention(model, text(), **SMALL)
    assert torch.equal(keys_of(model)[0], before)


def test_a_norm_of_all_heads_has_one_factor():
    model = make("qwen3")
    for factor in smooth_attention(model, text(), **SMALL).values():
        assert torch.equal(factor[0], factor[1]) and len(factor[0].unique()) > 1


def test_factors_are_the_papers_but_for_powers_of_two():
    largest = torch.tensor([[16.0, 1.0, 4.0, 0.0, 9.0, 0.0]])
    half = partners(6, 4, "half")
    assert half.tolist() == [2, 3, 0, 1, 4, 5]
    assert smoothing_factors(largest, half).tolist() == [[4, 1, 4, 1, 4, 1]]
    assert smoothing_factors(largest, half, 1.0).tolist() == [[16, 1, 16, 1, 8, 1]]
    assert partners(6, 4, "interleaved").tolist() == [1, 0, 3, 2, 4, 5]
    assert (smoothing_factors(largest, half, 0.0) == 1).all()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gpt2", {}, "no attention with separate q_proj and k_proj"),
        ("gemma3", {}, "would change what Gemma3ForCausalLM computes"),
        ("llama", {"alpha": 2}, r"alpha=...\) must be in \[0, 1\]"),
        ("llama", {"tokens": 512}, "the text is too short"),
    ],
)
def test_what_is_refused_is_left_as_it_was(name, options, message):
    model = make(name)
    before = {key: parameter.clone() for key, parameter in model.named_parameters()}
    with pytest.raises(VQCalibrationError, match=message):
        smooth_attention(model, text(), **{**SMALL, **options})
    assert all(torch.equal(p, before[key]) for key, p in model.named_parameters())


def test_keys_that_are_not_finite():
    model = make("llama")
    model.model.layers[1].self_attn.k_proj.weight.data[3] = torch.nan
    with pytest.raises(VQCalibrationError, match="NaN or infinity"):
        smooth_attention(model, text(), **SMALL)


def test_quantized_models_are_refused(quantized):
    model = AutoModelForCausalLM.from_pretrained(quantized())
    with pytest.raises(VQCalibrationError, match=r"is quantized or offloaded.*before you quantize"):
        smooth_attention(model, text(), **SMALL)


def test_it_is_public():
    assert hf_vq.smooth_attention is smooth_attention and "smooth_attention" in hf_vq.__all__
