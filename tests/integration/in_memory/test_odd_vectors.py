"""Vectors whose size is no power of two: a model, and codes that take up an adapter's change."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import hf_vq
from hf_vq import VQConfig, fit
from hf_vq.formats import VQScheme
from hf_vq.interop.small_change import fit_small_change, part_left
from hf_vq.nn.linear import VQLinear
from hf_vq.ops import decode_weight


@pytest.mark.filterwarnings("ignore:.*loses much quality")
@pytest.mark.parametrize("spec", ["vq3x5r1-tensor-g48-hadamard16", "vq6x3r2-tensor-g0-none"])
def test_quantized_and_saved(spec, tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=96, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=96, max_position_embeddings=128, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(32)[None]
    with torch.no_grad():
        dense = model(ids).logits
        hf_vq.quantize_model(model, VQConfig(scheme=spec, activations=None))
        assert sum(isinstance(layer, VQLinear) for layer in model.modules()) == 7
        coded = model(ids).logits
        assert (coded - dense).norm() < dense.norm()
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert torch.equal(loaded(ids).logits, coded)


@pytest.mark.parametrize(
    "spec",
    ["vq3x5r1-tensor-g0-none", "vq12x4r1-tensor-int7-g0-none", "vq3x4r1-tile16x192-g0-none"],
)
def test_a_change_stays_in_codes(spec):
    scheme = VQScheme.parse(spec)
    tensors = fit.fit_weight(torch.randn(64, 480), scheme).tensors
    before = decode_weight(tensors, scheme, 480)
    wanted = before + 0.02 * torch.randn(64, 2) @ torch.randn(2, 480)
    found = fit_small_change(wanted, tensors, scheme)
    assert found.keys() == {"codes"} and found["codes"].shape == tensors["codes"].shape
    after = decode_weight({**tensors, **found}, scheme, 480)
    assert abs(part_left(after, before, wanted) - 1) < 0.2
