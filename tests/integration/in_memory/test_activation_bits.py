"""`VQConfig(activations_bits=8)`: it reaches every layer, and nothing that is stored."""

import copy
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_vq
from hf_vq import VQConfig
from hf_vq.formats import VQScheme
from hf_vq.nn.replace import vq_modules

LOAD = AutoModelForCausalLM.from_pretrained


def bits_of(model):
    return {VQScheme.parse(module.spec).activations_bits for module in vq_modules(model).values()}


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_given_while_a_model_is_loaded(name, quantized, tmp_path):
    folder = quantized(name, "vq-4")
    usual = LOAD(folder)
    model = LOAD(folder, quantization_config=VQConfig(activations_bits=8))
    assert bits_of(usual) == {16} and bits_of(model) == {8}
    assert all(module.scheme.activations_bits == 16 for module in vq_modules(model).values())
    ids = torch.arange(60)[None] % usual.config.vocab_size
    with torch.no_grad():  # no kernel of a CPU multiplies so
        assert torch.equal(model(ids).logits, usual(ids).logits)
    model.save_pretrained(tmp_path)
    assert bits_of(LOAD(tmp_path)) == {16}
    assert "-a8" not in (tmp_path / "config.json").read_text()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(vq_modules(model)))):
        modules = copied if isinstance(copied, dict) else vq_modules(copied)
        assert all(module.spec.endswith("-a8") for module in modules.values())


def test_given_while_a_module_is_quantized():
    model = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.Linear(64, 128))
    hf_vq.quantize_model(model, VQConfig(activations=None, activations_bits=8))
    assert bits_of(model) == {8}
    for module in vq_modules(model).values():
        module.set_activations_bits(16)
    assert bits_of(model) == {16}


def test_given_while_a_model_is_quantized(dense):
    model = LOAD(dense("llama"), quantization_config=VQConfig(activations=None, activations_bits=8))
    assert bits_of(model) == {8}
    assert model.config.quantization_config.activations_bits == 8
