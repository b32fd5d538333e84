"""`quantize_model` after an adapter of PEFT was merged."""

import pytest
from torch import nn
from transformers import AutoModelForCausalLM

import hf_vq
from hf_vq import VQConfig, VQConfigError
from hf_vq.nn.replace import vq_modules

peft = pytest.importorskip("peft")
LOAD = AutoModelForCausalLM.from_pretrained
LAYERS = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:peft", "ignore:.*is_gradient_checkpointing:FutureWarning"
)


def test_a_merged_adapter_is_part_of_the_codes(dense):
    lora = peft.LoraConfig(target_modules="all-linear", r=4)
    adapted = peft.get_peft_model(LOAD(dense("llama")), lora)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    with pytest.raises(VQConfigError, match="merge them first"):
        hf_vq.quantize_model(adapted)
    merged = adapted.merge_and_unload()
    dense = {name: merged.get_submodule(name).weight.clone() for name in LAYERS}
    assert hf_vq.quantize_model(merged, VQConfig("turboquant-8")) is merged
    for name, weight in dense.items():
        decoded = vq_modules(merged)[name].decoded()
        assert (decoded - weight).norm() < 0.02 * weight.norm()
