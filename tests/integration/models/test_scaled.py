"""Models of scaled schemes: what their files hold, and everything that is done with a model."""

import copy
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_vq.cli import main
from hf_vq.errors import VQCalibrationError, VQConfigError, VQFormatError
from hf_vq.hf import VQConfig, config
from hf_vq.nn import VQExperts, VQLinear
from hf_vq.nn.replace import vq_modules
from tests.fixtures.checkpoints import CLEAN, LOAD, assert_same_state, logits
from tests.fixtures.random_weights import REROTATED, SHARED, scaled_models
from tests.fixtures.tiny_models import CONFIGS, tokens

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*calibration", "ignore:.*is_gradient_checkpointing:FutureWarning"
)
LAYER = "model.layers.1.mlp.down_proj"


def dense_of(folder, quantized):
    """The dense model of what a quantized one stores, in float64."""
    model = LOAD(folder, dtype=torch.float64, experts_implementation="eager")
    for name, module in vq_modules(quantized).items():
        layer = model.get_submodule(name)
        for weight in module.weights():
            linear = isinstance(module, VQLinear)
            decoded = module.decoded(torch.float64) if linear else module.decoded(weight)
            turned = linear and module.transposed
            getattr(layer, weight).data.copy_(decoded.T if turned else decoded)
    return model


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.usefixtures("reference_kernels")
def test_it_computes_what_it_stores(dense, quantized, name):
    model = LOAD(quantized(name, "vq-4-scaled"))
    exact = dense_of(dense(name), model)
    expected = logits(exact)
    allowed = 2 * (logits(exact.float()) - expected).abs().max() + 1e-5 * expected.abs().max()
    assert (logits(model) - expected).abs().max() <= allowed


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        *((name, "vq-4-scaled") for name in CONFIGS),
        *(("llama", f"{one}-scaled") for one in ("quip-sharp-2", "turboquant-4+2")),
        ("llama", REROTATED),
        ("llama", SHARED),
    ],
)
def test_a_saved_model_is_bit_equal(dense, tmp_path, name, scheme):
    with scaled_models():
        model = LOAD(dense(name), quantization_config=VQConfig(scheme))
    for module in vq_modules(model).values():
        kinds = [key for key in module.specs if key.split("_")[-1] in ("diagonal", "signs")]
        assert kinds and not any("signs" in key for key in kinds)
    model.save_pretrained(tmp_path)
    again, info = LOAD(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in CLEAN)
    assert_same_state(model, again)
    assert torch.equal(logits(model), logits(again))
    assert model.config.quantization_config.to_dict() == again.config.quantization_config.to_dict()
    assert again.config.quantization_config.format_version == 4


def test_experts_have_diagonals_of_their_own(quantized):
    model = LOAD(quantized("qwen3-moe", "vq-4-scaled"))
    experts = [m for m in vq_modules(model).values() if isinstance(m, VQExperts)]
    assert experts
    for module in experts:
        for name, projection in module.projections.items():
            diagonal = getattr(module, f"vq_{name}_diagonal")
            assert diagonal.shape == (module.num_experts, projection.in_features)
            assert not torch.equal(diagonal[0].abs(), diagonal[1].abs())


def test_dtypes_and_moves(quantized):
    model = LOAD(quantized("qwen3", "vq-4-scaled"))
    cast = copy.deepcopy(model).to(torch.bfloat16).bfloat16()
    for name, module in vq_modules(model).items():
        diagonal = cast.get_submodule(name).vq_diagonal
        assert diagonal.dtype == torch.float16 and torch.equal(diagonal, module.vq_diagonal)


@pytest.mark.usefixtures("reference_kernels")
def test_dequantize(dense, quantized):
    model = LOAD(quantized("llama", "vq-4-scaled"))
    before, exact = logits(model), dense_of(dense("llama"), model)
    assert model.dequantize() is model and not vq_modules(model)
    allowed = 2 * (logits(exact.float()) - logits(exact)).abs().max() + 1e-5 * before.abs().max()
    assert (logits(model) - before).abs().max() <= 2 * allowed


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_layers_on_disk(quantized, tmp_path, name):
    expected = logits(LOAD(quantized(name, "vq-4-scaled")))
    place = {"device_map": {"": "disk"}, "offload_folder": str(tmp_path)}
    model = LOAD(quantized(name, "vq-4-scaled"), **place)
    with torch.no_grad():
        assert torch.equal(model(tokens()).logits, expected)


def test_adapters_train(quantized):
    peft = pytest.importorskip("peft")
    base = LOAD(quantized("llama", "vq-4-scaled"))
    options = {"target_modules": ["q_proj", "down_proj"], "r": 4, "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(base, peft.LoraConfig(**options))
    loss = model(input_ids=tokens(), labels=tokens()).loss
    loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.fixture
def broken(quantized, tmp_path):
    """Change the tensors of a copy of a checkpoint, which then carries no digests."""

    def make(change, model="llama"):
        folder = shutil.copytree(quantized(model, "vq-4-scaled"), tmp_path / "broken")
        data = load_file(folder / "model.safetensors")
        change(data)
        save_file(data, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


def put(name, at, value):
    def change(data):
        data[name] = data[name].clone()
        data[name].view(-1)[at] = value

    return change


CHANGES = {
    "zero": (put(f"{LAYER}.vq_diagonal", 5, 0.0), f"{LAYER}.vq_diagonal holds a zero"),
    "nan": (put(f"{LAYER}.vq_diagonal", -1, float("nan")), f"{LAYER}.vq_diagonal holds NaN"),
    "infinity": (put(f"{LAYER}.vq_diagonal", 0, float("inf")), f"{LAYER}.vq_diagonal holds NaN"),
    "shape": (
        lambda data: data.update({f"{LAYER}.vq_diagonal": torch.ones(95).half()}),
        rf"{LAYER}.vq_diagonal is torch.float16 \[95\], expected torch.float16 \[96\]",
    ),
    "dtype": (
        lambda data: data.update({f"{LAYER}.vq_diagonal": torch.ones(96)}),
        f"{LAYER}.vq_diagonal is torch.float32",
    ),
    "missing": (lambda data: data.pop(f"{LAYER}.vq_diagonal"), f"lacks .*{LAYER}.vq_diagonal"),
    "signs": (
        lambda data: data.update({f"{LAYER}.vq_signs": torch.zeros(12, dtype=torch.uint8)}),
        f"{LAYER}.vq_signs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_diagonal_that_is_wrong(broken, change):
    edit, says = CHANGES[change]
    folder = broken(edit)
    with pytest.raises(VQFormatError, match=says) as caught:
        LOAD(folder)
    assert "again" in str(caught.value)


def test_a_diagonal_of_experts_that_is_wrong(broken):
    name = "model.layers.0.mlp.experts.vq_down_proj_diagonal"
    with pytest.raises(VQFormatError, match=f"{name} holds a zero"):
        LOAD(broken(put(name, 40, 0.0), "qwen3-moe"))


def test_a_flipped_bit_of_a_diagonal(quantized, tmp_path, capsys):
    folder = shutil.copytree(quantized("llama", "vq-4-scaled"), tmp_path / "copy")
    file = folder / "model.safetensors"
    raw = bytearray(file.read_bytes())
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    raw[8 + size + header[f"{LAYER}.vq_diagonal"]["data_offsets"][0]] ^= 1
    file.write_bytes(raw)
    with pytest.raises(VQFormatError, match=f"{LAYER}.vq_diagonal"):
        LOAD(folder)
    assert main(["verify", str(folder)]) == 1
    assert f"{LAYER}.vq_diagonal" in capsys.readouterr().out


def test_older_versions_refuse(quantized, monkeypatch):
    monkeypatch.setattr(config, "FORMAT_VERSION", 3)
    with pytest.raises(VQConfigError, match=r"format_version 4 is newer .* pip install -U hf_vq"):
        LOAD(quantized("llama", "vq-4-scaled"))


def test_what_is_said_of_it(quantized, capsys):
    folder = quantized("llama", "vq-4-scaled")
    assert main(["info", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "vq-4-scaled" in shown and "vq2x8r1-universal-g128-scaled_hadamard128" in shown
    assert "activation-aware" in shown
    card = (folder / "README.md").read_text()
    assert "`vq-4-scaled`, VQ<2,8,1>, activation-aware" in card


def test_one_layer_alone(dense, tmp_path):
    with scaled_models():
        options = {"layers": {"down_proj": "vq-2-scaled"}}
        model = LOAD(dense("llama"), quantization_config=VQConfig("vq-4", **options))
    assert model.config.quantization_config.format_version == 4
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(LOAD(tmp_path)), logits(model))
    assert main(["verify", str(tmp_path)]) == 0


def test_without_statistics(dense):
    with pytest.raises(VQCalibrationError, match=r"layers\.0\..*needs statistics of the layer's"):
        config = VQConfig("vq-4-scaled", activations=None)
        LOAD(dense("llama"), quantization_config=config)
