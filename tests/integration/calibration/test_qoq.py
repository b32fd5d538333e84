"""Calibration of QoQ: what each transform does to codes, what is recorded, what is refused."""

import json

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hf_vq.calibration.blocks import Blocks
from hf_vq.calibration.equivalent_transforms.qoq import Trial
from hf_vq.calibration.resume import ResumeFolder
from hf_vq.errors import VQCalibrationError, VQConfigError
from hf_vq.fit import FittedWeight
from hf_vq.hf import VQConfig
from hf_vq.hf.calibration_options import TRANSFORMS
from hf_vq.nn import W4A8Linear
from tests.fixtures.calibration import CALIBRATION, logits, written

SCHEME = "qoq-w4a8-g32"
NONE = dict.fromkeys(TRANSFORMS, False)


@pytest.fixture
def calibrate(dense):
    """`calibrate("llama", transforms={...}, resume=...)`: on the model's own words."""

    def load(name="llama", scheme=SCHEME, **options):
        config = VQConfig(scheme, calibration={**CALIBRATION, **options})
        return AutoModelForCausalLM.from_pretrained(dense(name), quantization_config=config)

    return load


def outputs_error(model):
    facts = model.config.quantization_config.provenance["calibration"]
    return sum(facts["output_error"].values())


@pytest.mark.parametrize(("name", "scheme"), [("llama-tied", SCHEME), ("qwen3", "qoq-w4a8")])
def test_models_come_closer_and_come_back(name, scheme, dense, calibrate, tmp_path):
    original = AutoModelForCausalLM.from_pretrained(dense(name))
    plain = AutoModelForCausalLM.from_pretrained(dense(name), quantization_config=VQConfig(scheme))
    model = calibrate(name, scheme)
    assert isinstance(model.model.layers[1].mlp.down_proj, W4A8Linear)
    ids = written(original)
    exact = logits(original, ids)
    errors = [(logits(other, ids) - exact).square().mean() for other in (model, plain)]
    assert errors[0] < 0.8 * errors[1]
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    old, new = model.state_dict(), again.state_dict()
    assert old.keys() == new.keys() and all(torch.equal(old[key], new[key]) for key in old)
    assert torch.equal(logits(again, ids), logits(model, ids))
    stored = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert stored["calibration"]["transforms"] == {
        **dict.fromkeys(TRANSFORMS, True),
        "reorder": scheme == SCHEME,
    }
    del stored["provenance"]["digests"]  # of the files
    assert VQConfig.from_dict(stored).to_dict() == model.config.quantization_config.to_dict()


def test_without_transforms_codes_are_the_nearest(dense, calibrate):
    plain = AutoModelForCausalLM.from_pretrained(
        dense("llama"), quantization_config=VQConfig(SCHEME)
    )
    model, nearest = calibrate(transforms=NONE).state_dict(), plain.state_dict()
    assert model.keys() == nearest.keys()
    assert all(torch.equal(model[key], nearest[key]) for key in nearest)


def test_clips_and_feedback_lower_what_they_minimise(calibrate):
    nothing, clip, feedback, both = (
        outputs_error(calibrate(transforms={**NONE, **dict.fromkeys(on, True)}))
        for on in ((), ("clip",), ("feedback",), ("clip", "feedback"))
    )
    assert both < feedback < nothing and both < clip < nothing


@pytest.mark.parametrize("one", ["rotate", "smooth_outputs", "reorder"])
def test_each_fold_alone_changes_codes(one, calibrate):
    plain, folded = (calibrate(transforms={**NONE, **on}) for on in ({}, {one: True}))
    old, new = plain.state_dict(), folded.state_dict()
    assert old.keys() == new.keys()
    assert any(not torch.equal(old[key], new[key]) for key in old)


def test_interrupted_it_goes_on_to_the_same_codes(calibrate, tmp_path, monkeypatch):
    whole = calibrate().state_dict()
    keep = ResumeFolder.save_block

    def stop(work, index, done, hidden):
        keep(work, index, done, hidden)
        raise KeyboardInterrupt

    monkeypatch.setattr(ResumeFolder, "save_block", stop)
    with pytest.raises(KeyboardInterrupt):
        calibrate(resume=str(tmp_path))
    monkeypatch.setattr(ResumeFolder, "save_block", keep)
    assert (tmp_path / "largest.safetensors").exists()
    # The second time nothing is looked for in the text again.
    monkeypatch.setattr("hf_vq.calibration.equivalent_transforms.qoq.largest_inputs", None)
    again = calibrate(resume=str(tmp_path)).state_dict()
    assert whole.keys() == again.keys() and all(torch.equal(whole[k], again[k]) for k in whole)
    with pytest.raises(VQCalibrationError, match=r"something else \(transforms differ\)"):
        calibrate(resume=str(tmp_path), transforms={"clip": False})


@torch.no_grad()
def test_a_block_chooses_by_what_it_returns(dense):
    model = AutoModelForCausalLM.from_pretrained(dense("llama"))
    blocks = Blocks(model, "model.layers", written(model))
    layer, place = model.model.layers[0].self_attn.q_proj, torch.device("cpu")
    trial = Trial(blocks, 0, place)
    dense_weight, noise = layer.weight.detach().clone(), iter((3.0, 1.0, 0.1, 2.0))

    def fit(clips):
        assert torch.equal(layer.weight, dense_weight), "every trial begins with the dense weight"
        return FittedWeight({"noise": torch.tensor(next(noise))}, 0.0)

    def decode(fitted):
        layer.weight.data.add_(fitted.tensors["noise"] * torch.randn(64, 64))

    assert float(trial.best(layer, fit, decode).tensors["noise"]) == pytest.approx(0.1)
    assert not torch.equal(layer.weight, dense_weight)


def test_models_of_another_build_need_their_folds_off(calibrate):
    with pytest.raises(VQCalibrationError, match=r"Gemma3ForCausalLM.*Turn them off"):
        calibrate("gemma3")
    off = dict.fromkeys(("rotate", "smooth_outputs", "reorder"), False)
    with pytest.raises(VQCalibrationError, match=r"SmoothAttention.*\"smooth_attention\": False"):
        calibrate("gemma3", transforms=off)
    off["smooth_attention"] = False
    assert outputs_error(calibrate("gemma3", transforms=off)) > 0
    assert isinstance(calibrate("gpt2", transforms=off).transformer.h[0].mlp.c_fc, nn.Module)


def test_some_layers_may_have_codebooks(calibrate, dense):
    config = VQConfig(SCHEME, layers={"down_proj": "vq-4"}, calibration=CALIBRATION)
    model = AutoModelForCausalLM.from_pretrained(dense("llama"), quantization_config=config)
    layer = model.model.layers[0]
    assert isinstance(layer.mlp.up_proj, W4A8Linear)
    assert not isinstance(layer.mlp.down_proj, W4A8Linear)


def test_nothing_is_folded_for_layers_of_other_schemes(dense, tmp_path):
    """Every layer has codebooks, though the config's own scheme is QoQ's."""
    config = VQConfig(SCHEME, layers={"model.layers": "vq-4"}, calibration=CALIBRATION)
    model = AutoModelForCausalLM.from_pretrained(dense("llama-tied"), quantization_config=config)
    original = AutoModelForCausalLM.from_pretrained(dense("llama-tied"))
    assert torch.equal(model.model.norm.weight, original.model.norm.weight)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, original.lm_head.weight)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    for one in (model, again):
        assert "transforms" not in one.config.quantization_config.calibration


@pytest.mark.parametrize(
    ("scheme", "options", "message"),
    [
        (SCHEME, {"transforms": {"turn": True}}, "has no 'turn'. Known: rotate"),
        (
            SCHEME,
            {"transforms": {"rotate": 1}},
            r"names and true or false; got .*\"rotate\": False",
        ),
        (SCHEME, {"transforms": ["rotate"]}, "must be a dict of names"),
        (SCHEME, {"finetune": "block"}, "moves codebooks, and qoq-w4a8-g32 has none"),
        ("vq-4", {"transforms": {"rotate": True}}, "need a QoQ scheme"),
    ],
)
def test_wrong_options_are_refused(scheme, options, message):
    with pytest.raises(VQConfigError, match=message):
        VQConfig(scheme, calibration={**CALIBRATION, **options})
