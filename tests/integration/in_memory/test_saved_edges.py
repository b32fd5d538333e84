"""`save_quantized` and `load_quantized` of modules with unusual names, methods and tensors."""

import json

import pytest
import torch
from torch import nn

import hf_vq
from hf_vq import VQConfig, VQConfigError, VQError, VQFormatError
from hf_vq.nn.replace import shared_names, vq_modules


class Named(nn.Module):
    """Names of its own that look like those of codes, and a state that is a tensor."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.vq_gate = nn.Parameter(torch.randn(3))
        self.conv = nn.Conv1d(4, 4, 1)
        self.conv.register_buffer("vq_step", torch.randn(2))
        self.linear = nn.Linear(size, 64)
        self.vq_norm = nn.BatchNorm1d(3)
        self.steps = torch.tensor(0)

    def get_extra_state(self) -> torch.Tensor:
        return self.steps

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.steps = state


class Hub(nn.Sequential):
    """As the mixin of huggingface_hub: its `save_pretrained` writes the state dict."""

    def save_pretrained(self, folder: str) -> None:
        torch.save(self.state_dict(), folder)


def test_names_that_look_like_those_of_codes(tmp_path):
    model = Named()
    model.steps += 7
    hf_vq.save_quantized(hf_vq.quantize_model(model), tmp_path)
    again = hf_vq.load_quantized(Named(), tmp_path)
    for get in (lambda m: m.vq_gate, lambda m: m.conv.vq_step, lambda m: m.steps):
        assert torch.equal(get(again), get(model))
    x = torch.randn(2, 64)
    with torch.no_grad():
        assert torch.equal(again.linear(x), model.linear(x))
    other = Named()
    del other.vq_gate
    with pytest.raises(VQConfigError, match="has no vq_gate"):
        hf_vq.load_quantized(other, tmp_path)


def test_a_name_that_codes_need_is_refused_before_encoding():
    model = Named()
    schemes = {"linear": VQConfig("vq-4").vq_scheme}
    name = sorted(shared_names(model, schemes, 0))[0]
    module, _, attribute = name.partition(".")
    model.add_module(module, holder := nn.Module())
    holder.register_buffer(attribute, torch.zeros(2))
    with pytest.raises(VQConfigError, match=f"{name} has the name"):
        hf_vq.quantize_model(model, VQConfig("vq-4"))
    assert type(model.linear) is nn.Linear


def test_modules_with_a_save_pretrained_that_does_not_know_codes(tmp_path):
    model = hf_vq.quantize_model(Hub(nn.Linear(64, 64)))
    with pytest.raises(VQError, match="save_quantized"):
        model.save_pretrained(tmp_path / "lost")
    hf_vq.save_quantized(model, tmp_path / "saved")
    again = hf_vq.load_quantized(Hub(nn.Linear(64, 64)), tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(again(torch.ones(1, 64)), model(torch.ones(1, 64)))
    hf_vq.dequantize(model).save_pretrained(tmp_path / "dense")
    nested = hf_vq.quantize_model(nn.Sequential(nn.ModuleDict({"a": Hub(nn.Linear(64, 64))})))
    with pytest.raises(VQError, match=r"quantize_model\(model\[0\]\.a\)"):
        nested[0]["a"].save_pretrained(tmp_path)


def test_a_damaged_file_leaves_the_module_dense(tmp_path):
    hf_vq.save_quantized(hf_vq.quantize_model(Named()), tmp_path)
    path = tmp_path / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    model = Named()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(VQFormatError, match="is not what was saved"):
        hf_vq.load_quantized(model, tmp_path)
    assert not vq_modules(model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_frozen_biases_stay_frozen(tmp_path):
    hf_vq.save_quantized(hf_vq.quantize_model(Named()), tmp_path)
    model = Named()
    model.linear.bias.requires_grad_(False)
    again = hf_vq.load_quantized(model, tmp_path)
    assert not again.linear.bias.requires_grad and again.conv.bias.requires_grad


def test_codes_go_where_their_layer_was(tmp_path):
    """The meta device stands for a second one: its tensors go to the first that is real."""
    hf_vq.save_quantized(hf_vq.quantize_model(Named()), tmp_path)
    model = Named()
    model.linear.to("meta")
    again = hf_vq.load_quantized(model, tmp_path)
    assert {tensor.device.type for tensor in again.state_dict().values()} == {"cpu"}


def test_layers_with_hooks_are_refused(tmp_path):
    hf_vq.save_quantized(hf_vq.quantize_model(Named()), tmp_path)
    model = Named()
    model.linear.register_forward_hook(lambda module, x, y: 2 * y)
    with pytest.raises(VQConfigError, match="linear has hooks"):
        hf_vq.load_quantized(model, tmp_path)


def test_a_config_of_deep_nesting(tmp_path):
    hf_vq.save_quantized(hf_vq.quantize_model(Named()), tmp_path)
    path = tmp_path / "config.json"
    depth = 100_000
    assert json.loads(path.read_text())
    path.write_text('{"a":' * depth + "1" + "}" * depth)
    with pytest.raises(VQConfigError, match="holds nothing that hf_vq"):
        hf_vq.load_quantized(Named(), tmp_path)
