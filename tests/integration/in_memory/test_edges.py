"""Modules whose layers are more than a matrix product, and calls that do not come to their end."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune, spectral_norm, weight_norm

import hf_vq
from hf_vq import VQConfig, VQConfigError, VQFormatError
from hf_vq.nn.replace import vq_modules
from hf_vq.progress import Progress


class WithScale(nn.Linear):
    """Its forward is `nn.Linear`'s; a buffer of its own is for somebody else."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("step", torch.ones(3))


def two(layer: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64) if layer is None else layer, nn.Linear(64, 64))


def double(layer: nn.Linear) -> None:
    forward = layer.forward
    layer.forward = lambda x: 2 * forward(x)


CHANGES = {
    "hook": lambda layer: layer.register_forward_hook(lambda module, x, y: 2 * y),
    "hook before": lambda layer: layer.register_forward_pre_hook(lambda module, x: 2 * x[0]),
    "forward": double,
    "submodule": lambda layer: layer.add_module("adapter", nn.Dropout()),
    "weight_norm": weight_norm,
    "spectral_norm": spectral_norm,
    "pruning": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_layers_that_are_more_than_their_weight_stay_dense(change, caplog):
    model, x = two().eval(), torch.randn(2, 64)
    change(model[0])
    with torch.no_grad():
        before = model[0](x)
        with caplog.at_level("WARNING", logger="hf_vq"):
            hf_vq.quantize_model(model)
        assert list(vq_modules(model)) == ["1"] and torch.equal(model[0](x), before)
    assert "1 of 2 layers" in caplog.text and "hooks or parts" in caplog.text
    with pytest.raises(VQConfigError, match="0 has"):
        change((other := two())[0])
        hf_vq.quantize_model(other, VQConfig(layers={"0": "vq-3"}))


def test_a_subclass_with_tensors_of_its_own_stays_dense():
    model = hf_vq.quantize_model(two(WithScale(64, 64)))
    assert list(vq_modules(model)) == ["1"] and len(model[0].step) == 3


def test_a_weight_that_is_not_finite_changes_nothing():
    model = two()
    model[1].weight.data[3, 5] = float("-inf")
    with pytest.raises(VQFormatError, match="1 holds NaN or infinity"):
        hf_vq.quantize_model(model)
    assert all(type(layer) is nn.Linear for layer in model)


@pytest.mark.parametrize("scheme", ["vq-4", "turboquant-4+4", "aqlm-3"])
def test_an_interrupted_call_leaves_a_model_that_runs(scheme, monkeypatch):
    model, x = two(), torch.randn(2, 64)
    done = Progress.done

    def interrupt(self: Progress) -> None:
        done(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "done", interrupt)
    with pytest.raises(KeyboardInterrupt):
        hf_vq.quantize_model(model, VQConfig(scheme))
    monkeypatch.undo()
    assert list(vq_modules(model)) == ["0"]
    with torch.no_grad():
        before = model(x)
        assert before.isfinite().all()
        with pytest.raises(VQConfigError, match="dequantize it first"):
            hf_vq.quantize_model(model)
        assert not vq_modules(hf_vq.dequantize(model))
        assert (model(x) - before).norm() < 0.05 * before.norm()
    hf_vq.quantize_model(model)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_encoders_of_pytorch_take_padded_inputs():
    block = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.ModuleDict({"encoder": nn.TransformerEncoder(block, 2)}).eval()
    x = torch.randn(2, 5, 64)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        dense = model["encoder"](x, src_key_padding_mask=padding)[~padding]
        hf_vq.quantize_model(model)
        found = model["encoder"](x, src_key_padding_mask=padding)[~padding]
    assert (found - dense).norm() < 0.5 * dense.norm()
    hf_vq.dequantize(model)
    assert model["encoder"].use_nested_tensor
    assert all(layer.activation_relu_or_gelu == 1 for layer in model["encoder"].layers)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 64)
        self.proj = nn.Linear(64, 10, bias=False)
        self.proj.weight = self.embedding.weight
        self.blocks = nn.ModuleList(nn.ModuleDict({"proj": nn.Linear(64, 64)}) for _ in range(2))
        self.blocks.append(self.blocks[0])
        self.blocks[1].proj.bias = self.blocks[0].proj.bias


def test_only_layers_that_share_their_weight_stay_dense():
    assert list(vq_modules(hf_vq.quantize_model(Tied()))) == ["blocks.0.proj", "blocks.1.proj"]


def test_dequantize_takes_the_dtype_of_the_model():
    model = hf_vq.quantize_model(two()).to(torch.bfloat16)
    assert hf_vq.dequantize(model)[0].weight.dtype == torch.bfloat16
    model = hf_vq.quantize_model(nn.Sequential(nn.Linear(64, 64, bias=False)))
    model.quantization_config.provenance["dtype"] = "save"  # of torch, but no dtype
    assert hf_vq.dequantize(model)[0].weight.dtype == torch.float32


def test_float64():
    model, x = two().double(), torch.randn(2, 64, dtype=torch.float64)
    before = model(x)
    hf_vq.quantize_model(model)
    assert (model(x) - before).norm() < 0.5 * before.norm()
    assert hf_vq.dequantize(model)[0].weight.dtype == torch.float64


def test_calls_for_a_wrapper_or_a_part_name_what_was_quantized(tmp_path):
    inner = hf_vq.quantize_model(two())
    for call in (hf_vq.dequantize, lambda model: hf_vq.save_quantized(model, tmp_path)):
        with pytest.raises(VQConfigError, match="give its part inner"):
            call(nn.ModuleDict({"inner": inner}))
    assert vq_modules(inner)
    whole = hf_vq.quantize_model(nn.ModuleDict({"inner": two()}))
    with pytest.raises(VQConfigError, match="give the whole"):
        hf_vq.save_quantized(whole["inner"], tmp_path)
