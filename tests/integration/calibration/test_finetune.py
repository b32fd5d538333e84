"""Fine-tuning: what moves, by which gradient, towards what; killed, it goes on."""

import os

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hf_vq.calibration import finetune, layerwise
from hf_vq.calibration.finetune import TunedBlock
from hf_vq.calibration.resume import CodedBlock
from hf_vq.calibration.targets import targets_of
from hf_vq.calibration.text import sample_text
from hf_vq.errors import VQCalibrationError, VQConfigError
from hf_vq.fit import fit_weight, fixed_tensors
from hf_vq.formats import VQScheme
from hf_vq.hf import VQConfig
from hf_vq.ops import decode_weight

CALIBRATION = {"text": "model", "tokens": 256, "context": 32}
SPECS = (
    "vq4x4r2-tensor-g0-none",
    "vq4x4r1-tile16x32-g0-none",
    "vq2x6r1-universal-g16-random_hadamard16",
    "vq1x3r2-universal-g16-random_hadamard16-rerotated",
    "vq1x3r2-universal-g16-random_hadamard16-nested",
)


@pytest.fixture
def tune(dense, monkeypatch):
    """`tune("block", "vq-2", resume=...)`: a llama tuned on its own words."""
    monkeypatch.setattr(finetune, "EPOCHS", 3)

    def load(how, scheme="vq-2", name="llama", **options):
        options = {**CALIBRATION, "finetune": how, **options}
        config = VQConfig(scheme, calibration=options)
        return AutoModelForCausalLM.from_pretrained(dense(name), quantization_config=config)

    return load


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(64), nn.Linear(64, 24)


def tuned(spec):
    scheme, block = VQScheme.parse(spec), Small()
    fitted = fit_weight(block.up.weight.detach(), scheme)
    [part] = targets_of("h.0.up", block.up)
    done = CodedBlock({"h.0.up": fitted})
    device = torch.device("cpu")
    return TunedBlock(block, "h.0.", done, [part], {"h.0.up": scheme}, 0, device, 4.0), scheme


@pytest.mark.parametrize("spec", SPECS)
def test_a_tuned_weight_is_the_stored_one_and_has_its_slope(spec):
    """A step along the gradient changes a loss by its squared length, to first order."""
    part, scheme = tuned(spec)
    fitted = part.done.fitted["h.0.up"]
    fixed = fixed_tensors(scheme, 64, 0)
    expected = decode_weight({**fixed, **fitted.tensors}, scheme, 64)
    found = part.tensors()
    assert set(found) == {"up.weight", "up.bias", "norm.weight", "norm.bias"}
    torch.testing.assert_close(found["up.weight"], expected, atol=1e-6, rtol=1e-5)
    weight = torch.randn(24, 64).double()
    deltas = list(part.deltas["h.0.up"].values())
    keys = {"scale", "codebook"} if scheme.codebook != "universal" else {"scale"}
    keys |= {"scale_2"} if scheme.stages == "rerotated" else set()
    assert part.parameters()[-1].shape == (24, 64) or not part.moving
    assert bool(part.moving) == ("2x6r1-universal" in spec)
    assert set(part.deltas["h.0.up"]) == keys
    slope = torch.autograd.grad((part.tensors()["up.weight"] * weight).sum(), deltas)
    length = sum(float(gradient.double().square().sum()) for gradient in slope)
    step = 1e-3 / length**0.5
    with torch.no_grad():
        for delta, gradient in zip(deltas, slope, strict=True):
            delta += step * gradient
        change = float(((part.tensors()["up.weight"] - expected) * weight).sum())
    assert change == pytest.approx(step * length, rel=0.02)


@pytest.mark.filterwarnings("ignore:vq-2 loses much quality")
@pytest.mark.parametrize("how", ["block", "model"])
@pytest.mark.parametrize("scheme", ["vq-2", "gptvq-2"])
def test_it_comes_closer(how, scheme, tune, dense, tmp_path):
    plain, found = tune(None, scheme), tune(how, scheme)
    about = found.config.quantization_config.provenance["calibration"]
    losses = about["finetune_loss"]
    assert len(losses) == 2 and ("finetune_divergence" in about) == (how == "model")
    assert all(after < 0.99 * before for before, after in losses)
    assert "finetune_loss" not in plain.config.quantization_config.provenance["calibration"]
    assert found.config.quantization_config.calibration["finetune"] == how
    old, new = plain.state_dict(), found.state_dict()
    assert old.keys() == new.keys()
    moved = {key for key in old if not torch.equal(old[key], new[key])}
    first = "model.layers.0"
    assert {f"{first}.self_attn.q_proj.vq_scale", f"{first}.input_layernorm.weight"} < moved
    assert (f"{first}.mlp.up_proj.vq_codebook" in moved) == (scheme == "gptvq-2")
    assert "model.norm.weight" not in moved
    if how == "model":
        original = AutoModelForCausalLM.from_pretrained(dense("llama"))
        ids = sample_text(original, 8, 32)
        with torch.no_grad():
            expected, *others = (m(ids).logits.log_softmax(-1) for m in (original, plain, found))
        klds = [float((expected.exp() * (expected - q)).sum(-1).mean()) for q in others]
        before, after = about["finetune_divergence"]
        # It is that of the model, on the text that it was tuned on, first block by block.
        assert klds[1] == pytest.approx(after, rel=0.02) and after < 0.99 * before < klds[0]
    found.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(new[key], again[key]) for key in new)


def test_codes_move_or_stay_as_told(tune, monkeypatch):
    """In a few steps they move only where these are large."""
    monkeypatch.setattr(layerwise, "ENTRY_STEP", 20.0)
    name, moved = "model.layers.0.self_attn.q_proj", {}
    plain = tune(None).state_dict()
    for move in (True, False):
        found = tune("block", move_codes=move)
        about = found.config.quantization_config
        moved[move] = not torch.equal(plain[f"{name}.weight"], found.state_dict()[f"{name}.weight"])
        assert about.calibration["move_codes"] is move
        assert not torch.equal(plain[f"{name}.vq_scale"], found.state_dict()[f"{name}.vq_scale"])
        losses = about.provenance["calibration"]["finetune_loss"]
        assert all(after < before for before, after in losses)
    assert moved == {True: True, False: False}


class Killed(BaseException):
    """Stands for SIGKILL."""


@pytest.mark.parametrize("how", ["block", "model"])
def test_killed_after_any_file_it_goes_on(how, tune, tmp_path, monkeypatch):
    whole, replace, folder = tune(how), os.replace, tmp_path / "work"

    def dying(source, target):
        again = target.exists()
        replace(source, target)
        if not again or target.name == "finetune.safetensors":
            raise Killed

    runs = 0
    while True:
        runs += 1
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", dying)
            try:
                found = tune(how, resume=str(folder))
                break
            except Killed:
                continue
    # The text, two blocks, hidden states between and, for the model, after them; epochs.
    assert runs == (1 + 2 + 1 + 1 if how == "block" else 1 + 2 + 2 + 3 + 1)
    old, new = whole.state_dict(), found.state_dict()
    assert all(torch.equal(old[key], new[key]) for key in old)
    assert whole.config.quantization_config.to_dict() == found.config.quantization_config.to_dict()


def test_it_never_ends_worse(tune, monkeypatch):
    monkeypatch.setattr(finetune, "LEARNING_RATE", 10.0)
    plain, found = tune(None), tune("block")
    losses = found.config.quantization_config.provenance["calibration"]["finetune_loss"]
    assert all(before == after for before, after in losses)
    # What the second block reads was summed in another order.
    old, new = plain.state_dict(), found.state_dict()
    first = [key for key in old if key.startswith("model.layers.0.")]
    assert first and all(torch.equal(old[key], new[key]) for key in first)


def test_experts_are_tuned_too(tune):
    found = tune("block", "vq-4", "qwen3-moe")
    losses = found.config.quantization_config.provenance["calibration"]["finetune_loss"]
    assert len(losses) == 2 and all(after < before for before, after in losses)


def test_what_is_refused(tune, monkeypatch):
    with pytest.raises(VQConfigError, match="must be 'block' or 'model'; got 'all'"):
        VQConfig("vq-2", calibration={"text": "a.txt", "finetune": "all"})
    for options in ({"move_codes": True}, {"move_codes": 1, "finetune": "block"}):
        with pytest.raises(VQConfigError, match="together with 'finetune'; got"):
            VQConfig("vq-2", calibration={"text": "a.txt", **options})
    monkeypatch.setattr(
        finetune._Descent, "settle", lambda self, _: self.parameters[0].detach().fill_(torch.nan)
    )
    with pytest.raises(VQCalibrationError, match=r"fine-tuning of .*leave \"finetune\" out"):
        tune("block")
