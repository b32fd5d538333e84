"""model.dequantize(): dense layers of the original classes again."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from hf_vq.nn.replace import vq_modules
from tests.fixtures.tiny_models import CONFIGS, tokens

LOAD = AutoModelForCausalLM.from_pretrained


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.usefixtures("reference_kernels")
def test_dequantize(dense, quantized, tmp_path, name):
    model = LOAD(quantized(name))
    stored = {
        f"{prefix}.{weight}": (
            module.decoded() if isinstance(module, nn.Linear) else module.decoded(weight)
        )
        for prefix, module in vq_modules(model).items()
        for weight in module.weights()
    }
    original = LOAD(dense(name))
    with torch.no_grad():
        before = model(tokens()).logits
    assert model.dequantize() is model
    assert not vq_modules(model) and not hasattr(model.config, "quantization_config")
    state = original.state_dict()
    assert {key: tensor.shape for key, tensor in model.state_dict().items()} == {
        key: tensor.shape for key, tensor in state.items()
    }
    for key, tensor in model.state_dict().items():
        if key in stored:
            decoded = stored[key].T if tensor.shape != stored[key].shape else stored[key]
            decoded = stored[key].T if name == "gpt2" else decoded
            assert torch.equal(tensor, decoded)
        else:
            assert torch.equal(tensor, state[key])
    with torch.no_grad():
        after = model(tokens()).logits
        exact = copy.deepcopy(model).double()
        exact.config._experts_implementation = "eager"  # the others know no float64
        exact = exact(tokens()).logits
    # The error of the same maths in the same dtype is the yardstick.
    allowed = 2 * (after - exact).abs().max() + 1e-5 * exact.abs().max()
    assert (before - exact).abs().max() <= allowed
    model.save_pretrained(tmp_path)  # an ordinary model, saved in the ordinary way
    again, info = LOAD(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not (tmp_path / "README.md").exists()
    with torch.no_grad():
        assert torch.equal(again(tokens()).logits, after)


def test_a_gpt2_layer_is_a_conv1d_again(quantized):
    model = LOAD(quantized("gpt2"))
    assert isinstance(model.transformer.h[0].attn.c_attn, nn.Linear)
    layer = model.dequantize().transformer.h[0].attn.c_attn
    assert type(layer) is Conv1D and layer.weight.shape == (64, 192) and layer.weight.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16"])
def test_another_dtype(quantized, dtype):
    model = LOAD(quantized()).dequantize(dtype)
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
