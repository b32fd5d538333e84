"""`quantize_model`: a model in memory becomes the one that loading it quantized would have made."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

import hf_vq
from hf_vq import VQConfig, VQConfigError, VQFormatError, VQSchemeError
from hf_vq.nn.replace import vq_modules
from tests.fixtures.tiny_models import CONFIGS, tokens

LOAD = AutoModelForCausalLM.from_pretrained


def equal_states(one: nn.Module, other: nn.Module) -> None:
    first, second = one.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        assert torch.equal(tensor, second[key]) and tensor.dtype == second[key].dtype, key


def count_parameters(model) -> list[int]:
    return [model.num_parameters(exclude_embeddings=without) for without in (False, True)]


def as_loaded(folder, tmp_path, **options) -> nn.Module:
    """Quantize in memory and while loading; compare, and reload what the first one saved."""
    loaded = LOAD(folder, quantization_config=VQConfig(**options))
    model = LOAD(folder)
    counts = count_parameters(model)
    assert hf_vq.quantize_model(model, VQConfig(**options)) is model
    equal_states(model, loaded)
    assert model.config.quantization_config.to_dict() == loaded.config.quantization_config.to_dict()
    assert count_parameters(model) == count_parameters(loaded) == counts
    with torch.no_grad():
        before = model(tokens()).logits
        assert torch.equal(before, loaded(tokens()).logits)
    model.save_pretrained(tmp_path / "saved")
    again, info = LOAD(tmp_path / "saved", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        assert torch.equal(again(tokens()).logits, before)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_the_model_that_loading_makes(name, dense, tmp_path):
    model = as_loaded(dense(name), tmp_path)
    assert hf_vq.dequantize(model) is model and not vq_modules(model)
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize(
    "options",
    [
        {"scheme": "turboquant-4+4", "pass2": "offload"},
        {"scheme": "vq-4-scaled", "activations": "random"},
        {"scheme": "qoq-w4a8"},
        {"scheme": "vq-4", "embeddings": "int8", "modules_to_not_convert": ["layers.0"]},
        {"scheme": "vq-3", "layers": {"down_proj": "turboquant-8"}, "seed": 3, "search": "norm"},
    ],
    ids=lambda options: options["scheme"],
)
def test_options_of_the_config(options, dense, tmp_path):
    as_loaded(dense("llama"), tmp_path, **options)


def test_calibration(dense, tmp_path):
    calibration = {"text": "model", "tokens": 64, "context": 16}
    as_loaded(dense("llama"), tmp_path, scheme="vq-3", calibration=calibration)


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_a_model_without_a_checkpoint(name, tmp_path):
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).train()
    hf_vq.quantize_model(model)
    assert all(module.training for module in model.modules())
    with torch.no_grad():
        before = model.eval()(tokens()).logits
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(LOAD(tmp_path)(tokens()).logits, before)


def test_an_error_leaves_layers_whole(dense):
    model = LOAD(dense("qwen3-moe"))
    model.model.layers[1].mlp.experts.gate_up_proj.data[1, 2, 3] = float("nan")
    where = r"model\.layers\.1\.mlp\.experts\.gate_up_proj holds NaN"
    with pytest.raises(hf_vq.VQError, match=where):
        hf_vq.quantize_model(model)
    assert model.model.layers[1].mlp.experts.gate_up_proj.shape[0] == 4


def test_what_is_refused(dense, quantized):
    for model, reason in (
        (LOAD(quantized("llama")), "quantized already, by hf_vq"),
        (nn.Linear(64, 64), "is itself a layer"),
        (nn.Sequential(nn.Conv2d(3, 3, 3)), "no layer to quantize"),
        (nn.Sequential(nn.Linear(64, 64, device="meta")), r"0\.weight is not in memory"),
        ("model", "needs an nn.Module"),
    ):
        with pytest.raises(VQConfigError, match=reason):
            hf_vq.quantize_model(model)
    for options, reason in (
        ({"calibration": "default"}, "calibration needs a model of Transformers"),
        ({"activations": "random"}, "activations needs a model of Transformers"),
        ({"target_bits": 3}, "target_bits needs a model of Transformers"),
        ({"embeddings": "int8"}, "embeddings needs a model of Transformers"),
        ({"pass2": "offload"}, "has one pass"),
        ({"layers": {"blocks": "vq-3"}}, "'blocks' matches no module"),
    ):
        module = nn.Sequential(nn.Linear(64, 64))
        with pytest.raises(VQConfigError, match=reason):
            hf_vq.quantize_model(module, VQConfig(**options))
        assert type(module[0]) is nn.Linear and not hasattr(module, "quantization_config")
    with pytest.raises(VQConfigError, match="needs a VQConfig; got str"):
        hf_vq.quantize_model(LOAD(dense("llama")), "vq-4")
    with pytest.raises(VQSchemeError, match="in_features=62"):
        hf_vq.quantize_model(nn.Sequential(nn.Linear(62, 64)))
    with pytest.raises(VQConfigError, match="no layers of hf_vq"):
        hf_vq.dequantize(nn.Linear(64, 64))


class Tagger(nn.Module):
    """A module of nobody's library: a tied head, PyTorch's encoder, a convolution, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        block = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.encoder = nn.TransformerEncoder(block, 2)
        self.conv = nn.Conv1d(64, 64, 3, padding=1)
        self.norm = nn.BatchNorm1d(64)
        self.wide = nn.Linear(64, 96)
        self.back = nn.Linear(96, 64, bias=False)
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mean", torch.randn(64))
        self.register_buffer("factor", torch.ones(64) / 2, persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.encoder(self.embedding(ids)) - self.mean * self.factor
        x = self.norm(self.conv(x.mT)).mT
        return self.head(x + self.back(self.wide(x).relu()))


@pytest.mark.parametrize("scheme", ["vq-4", "turboquant-4+4", "qoq-w4a8", "aqlm-2"])
def test_a_module_of_ones_own(scheme, tmp_path):
    model, ids = Tagger().eval(), torch.randint(0, 50, (2, 7))
    with torch.no_grad():
        dense = model(ids)
        before = hf_vq.quantize_model(model, VQConfig(scheme))(ids)
    assert set(vq_modules(model)) == {
        "wide", "back", *(f"encoder.layers.{i}.linear{k}" for i in (0, 1) for k in (1, 2)),
    }  # fmt: skip
    assert (before - dense).norm() < 0.5 * dense.norm()
    hf_vq.save_quantized(model, tmp_path)
    again = hf_vq.load_quantized(Tagger(), tmp_path)
    with torch.no_grad():
        assert torch.equal(again(ids), before)
    assert again.head.weight is again.embedding.weight
    hf_vq.save_quantized(again, tmp_path / "again")
    assert (tmp_path / "model.safetensors").read_bytes() == (
        tmp_path / "again" / "model.safetensors"
    ).read_bytes()
    copied = copy.deepcopy(again)
    with torch.no_grad():
        assert torch.equal(copied(ids), before)
    assert type(hf_vq.dequantize(again).wide) is nn.Linear
    with torch.no_grad():
        assert (again(ids) - before).norm() < 0.05 * before.norm()


def test_bfloat16_and_the_meta_device(tmp_path):
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)).bfloat16()
    hf_vq.quantize_model(model, VQConfig(layers={"0": "vq-3"}))
    hf_vq.save_quantized(model, tmp_path)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
    again = hf_vq.load_quantized(empty, tmp_path)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    assert torch.equal(again(x), model(x))
    assert hf_vq.dequantize(again)[0].weight.dtype == torch.bfloat16


def test_files_of_another_module_and_damaged_ones(tmp_path, quantized, dense):
    model = hf_vq.quantize_model(Tagger())
    hf_vq.save_quantized(model, tmp_path)
    for other, reason in (
        (nn.Sequential(nn.Linear(64, 64)), "has no"),
        (Other(), "has, and the file lacks, extra.bias"),
        (hf_vq.quantize_model(Tagger()), "quantized already"),
        (LOAD(dense("llama")), "loaded by from_pretrained"),
    ):
        with pytest.raises(VQConfigError, match=reason):
            hf_vq.load_quantized(other, tmp_path)
    with pytest.raises(VQConfigError, match="holds nothing that hf_vq"):
        hf_vq.load_quantized(Tagger(), dense("llama"))
    for wrong, reason in (
        (LOAD(quantized("llama")), "saved by model.save_pretrained"),
        (Tagger(), "quantize_model comes first"),
    ):
        with pytest.raises(VQConfigError, match=reason):
            hf_vq.save_quantized(wrong, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    path = tmp_path / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(VQFormatError, match="is not what was saved"):
        hf_vq.load_quantized(Tagger(), tmp_path)


class Other(Tagger):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(64, 64)


def test_a_model_of_transformers_inside_another_module(dense, tmp_path):
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = AutoModel.from_pretrained(dense("llama"))
            self.head = nn.Linear(64, 32)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(ids).last_hidden_state[:, -1])

    model = hf_vq.quantize_model(Classifier())
    assert "head" in vq_modules(model) and len(vq_modules(model)) == 15
    with pytest.raises(hf_vq.VQError, match=r"quantize_model\(model\.body\)"):
        model.body.save_pretrained(tmp_path)
    hf_vq.save_quantized(model, tmp_path)
    again = hf_vq.load_quantized(Classifier(), tmp_path)
    with torch.no_grad():
        assert torch.equal(again(tokens()), model.eval()(tokens()))
    hf_vq.dequantize(model).body.save_pretrained(tmp_path / "body")
