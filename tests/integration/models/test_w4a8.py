"""QoQ's format through `from_pretrained`, `save_pretrained` and back."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hf_vq
from hf_vq.errors import VQConfigError, VQFormatError, VQSchemeError
from hf_vq.formats import QoQScheme
from hf_vq.formats.digests import Header
from hf_vq.hf import VQConfig
from hf_vq.nn import VQLinear, W4A8Linear
from hf_vq.nn.replace import vq_modules
from tests.fixtures.checkpoints import assert_same_state, logits
from tests.fixtures.tiny_models import CONFIGS

LOAD = AutoModelForCausalLM.from_pretrained
CLEAN = {"missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"}


@pytest.mark.parametrize("scheme", ["qoq-w4a8", "qoq-w4a8-g128"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_model_is_bit_equal(dense, tmp_path, name, scheme) -> None:
    model = LOAD(dense(name), quantization_config=VQConfig(scheme))
    assert any(isinstance(module, W4A8Linear) for module in vq_modules(model).values())
    model.save_pretrained(tmp_path)
    again, info = LOAD(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in CLEAN)
    assert_same_state(model, again)
    assert torch.equal(logits(model), logits(again))
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert stored["format_version"] == 3
    assert stored["scheme"] == {"format": "qoq-w4a8", "group": 128 * scheme.endswith("g128")}
    original = logits(LOAD(dense(name)))
    assert (logits(again) - original).norm() < 0.3 * original.norm()


def test_one_layer_has_it_and_others_have_codebooks(dense, tmp_path) -> None:
    config = VQConfig("vq-4", layers={"down_proj": "qoq-w4a8-g32"})
    model = LOAD(dense("llama"), quantization_config=config)
    kinds = {name: type(module) for name, module in vq_modules(model).items()}
    assert {n for n, kind in kinds.items() if kind is W4A8Linear} == {
        f"model.layers.{i}.mlp.down_proj" for i in range(2)
    }
    assert set(kinds.values()) == {W4A8Linear, VQLinear}
    model.save_pretrained(tmp_path)
    again = LOAD(tmp_path)
    assert_same_state(model, again)
    assert again.config.quantization_config.format_version == 3
    assert again.config.quantization_config.vq_scheme.spec().startswith("vq2x8")
    found = hf_vq.explain(again)
    assert {row.problem.op for row in found} == {"linear", "w4a8_linear"}


def test_dequantized_weights_are_what_is_stored(dense) -> None:
    model = LOAD(dense("llama"), quantization_config=VQConfig("qoq-w4a8-g128"))
    decoded = {name: module.decoded() for name, module in vq_modules(model).items()}
    restored = model.dequantize()
    for name, weight in decoded.items():
        assert torch.equal(restored.get_submodule(name).weight, weight)


def test_what_it_does_not_do(dense) -> None:
    with pytest.raises(VQConfigError, match=r"moves codebooks, and qoq-w4a8-g128 has none"):
        VQConfig("qoq-w4a8-g128", calibration={"text": "model", "finetune": "block"})
    with pytest.raises(VQConfigError, match="cannot be one of the candidates"):
        VQConfig(target_bits=4, candidates=["vq-3", "qoq-w4a8"])
    with pytest.raises(VQSchemeError, match="group of QoQ"):
        VQConfig("qoq-w4a8-g48")
    assert VQConfig(QoQScheme(64)).scheme_name == "qoq-w4a8-g64"


@pytest.mark.parametrize("scheme", ["qoq-w4a8", "qoq-w4a8-g128"])
def test_scales_and_zeros_that_are_not_finite_are_refused(dense, tmp_path, scheme) -> None:
    """Kernels take them to be finite: infinity times a sum in two parts may be NaN."""
    LOAD(dense("llama"), quantization_config=VQConfig(scheme)).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors, name = load_file(file), "model.layers.1.mlp.up_proj"
    floats = {key for key, tensor in tensors.items() if name in key and tensor.is_floating_point()}
    assert floats == {f"{name}.{a}" for a in ("vq_scale", "vq_zero")[: 2 - ("g" in scheme[4:])]}
    for key in floats:
        for value in (torch.inf, -torch.inf, torch.nan):
            wrong = tensors[key].clone()
            wrong[3, 0] = value
            save_file({**tensors, key: wrong}, file, {"format": "pt"})
            for place in ("cpu", {"": "disk"}):
                with pytest.raises(VQFormatError, match=r"up_proj\.vq_\w+ holds NaN or infinity"):
                    LOAD(tmp_path, device_map=place, offload_folder=tmp_path / "offloaded")


def test_weights_too_large_for_scales_are_refused(dense, tmp_path) -> None:
    model = LOAD(dense("llama"))
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = 1e8
    model.save_pretrained(tmp_path)
    for scheme in ("qoq-w4a8", "qoq-w4a8-g128"):
        with pytest.raises(VQFormatError, match=r"layers\.1\.mlp\.up_proj.* too large for fp16"):
            LOAD(tmp_path, quantization_config=VQConfig(scheme))


def test_damaged_files_are_refused(dense, tmp_path) -> None:
    LOAD(dense("llama"), quantization_config=VQConfig("qoq-w4a8-g128")).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors, name = load_file(file), "model.layers.1.self_attn.k_proj"
    metadata = Header(file).metadata
    assert {key.rpartition(".")[2] for key in tensors if key.startswith(name)} == {
        "weight", "vq_scale", "vq_step", "vq_zero",
    }  # fmt: skip

    def damaged(key: str, value: float) -> None:
        wrong = {n: tensor.clone() for n, tensor in tensors.items()}
        wrong[f"{name}.{key}"][0, 0] = value
        save_file(wrong, file, {"format": "pt"})

    damaged("vq_step", 18)
    with pytest.raises(VQFormatError, match=r"k_proj\.vq_step holds integers beyond 17"):
        LOAD(tmp_path)
    damaged("vq_scale", torch.nan)
    with pytest.raises(VQFormatError, match=r"k_proj\.vq_scale holds NaN"):
        LOAD(tmp_path)
    wrong = {n: tensor.clone() for n, tensor in tensors.items()}
    wrong[f"{name}.weight"][0, 0], wrong[f"{name}.vq_step"][0, 0] = 0xFF, 17
    save_file(wrong, file, {"format": "pt"})
    with pytest.raises(VQFormatError, match="k_proj: group 0 of row 0 holds the integer"):
        LOAD(tmp_path)
    del wrong[f"{name}.vq_zero"]
    save_file(wrong, file, {"format": "pt"})
    with pytest.raises(VQFormatError, match=r"lacks model\.layers\.1\.self_attn\.k_proj\.vq_zero"):
        LOAD(tmp_path)
    save_file(tensors, file, metadata)
    LOAD(tmp_path)
