"""What a scheme costs in a layer, and the schemes that `target_bits` gives to layers."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_vq.calibration import weight_allocation
from hf_vq.calibration.blocks import Blocks
from hf_vq.calibration.targets import targets_of
from hf_vq.calibration.text import sample_text
from hf_vq.errors import VQCalibrationError, VQConfigError
from hf_vq.fit import fit_weight
from hf_vq.formats.catalog import linear_scheme, weight_scheme
from hf_vq.hf import VQConfig
from hf_vq.hf.checkpoint.headers import storage
from hf_vq.nn.replace import candidates
from tests.fixtures.tiny_models import tokens

CALIBRATION = {"text": "model", "tokens": 128, "context": 32}
LOAD = AutoModelForCausalLM.from_pretrained
MLP = ["mlp"]


def measured(model, names, config):
    ids = sample_text(model, 8, 32)
    parts = [p for n, m in candidates(model) for p in targets_of(n, m) if n in names]
    with torch.no_grad():
        blocks = Blocks(model, "model.layers", ids)
        return ids, weight_allocation.measure_costs(blocks, ids, parts, config, None)


def test_costs_are_the_divergence_they_foretell(dense):
    """Each layer is coded alone, and the KL divergence of the predictions compared.

    Predictions use 256 words drawn and leave out what tokens and outputs have in common, so single
    layers are off; in the mean over layers and in their order they are right.
    """
    model = LOAD(dense("llama"))
    kinds = ("q_proj", "v_proj", "up_proj", "down_proj")
    names = [name for name, _ in candidates(model) if name.endswith(kinds)]
    config = VQConfig(target_bits=3, candidates=["turboquant-2", "turboquant-4"])
    ids, costs = measured(model, names, config)
    scheme = weight_scheme("turboquant-2")
    found, expected = [], []
    with torch.no_grad():
        exact = model(ids).logits.double().log_softmax(-1)
        for name in names:
            layer = model.get_submodule(name)
            weight = layer.weight.clone()
            error = fit_weight(weight, scheme).relative_error
            # As large an error as the codes', in any direction: with inputs as they are.
            torch.manual_seed(1)
            noise = torch.randn_like(weight) * (error * weight.square().mean()).sqrt()
            layer.weight.add_(noise)
            other = model(ids).logits.double().log_softmax(-1)
            layer.weight.copy_(weight)
            expected.append(float((exact.exp() * (exact - other)).sum(-1).mean()))
            found.append(costs[name][scheme.spec()])
            ratio = costs[name][weight_scheme("turboquant-4").spec()] / found[-1]
            assert 0.03 < ratio < 0.2, "0.0095 / 0.1175 for Gaussian weights"
    # Feedback makes codes better than noise of the same size, by about the same in every layer.
    logs = torch.tensor([found, expected]).log()
    assert torch.corrcoef(logs)[0, 1] > 0.8
    assert 0.2 < sum(found) / sum(expected) < 1.5


@pytest.mark.parametrize(
    ("name", "skip", "target", "given"),
    [
        ("llama", "mlp", 4, "vq-4"),
        ("llama", "mlp", 4, "qoq-w4a8-g32"),
        ("qwen3-moe", "self_attn", 5, None),
    ],
)
def test_schemes_are_chosen_recorded_and_read_again(name, skip, target, given, dense, tmp_path):
    fixed = {"layers": {"layers.0.self_attn.v_proj": given}} if given else {}
    config = VQConfig(
        target_bits=target,
        candidates=["turboquant-2", "turboquant-5"],
        calibration=CALIBRATION,
        modules_to_not_convert=[skip],
        **fixed,
    )
    model = LOAD(dense(name), quantization_config=config)
    found = model.config.quantization_config
    bits, weights = storage(model)
    assert 2.3 < bits / weights <= target
    assert len(set(found.layers.values())) == (3 if given else 2)
    if given:
        assert found.layers["model.layers.0.self_attn.v_proj"] == linear_scheme(given).spec()
    assert found.format_version == (3 if given and given.startswith("qoq") else 2)
    assert found.provenance["calibration"]["predicted_kld"] > 0
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert stored["target_bits"] == target and stored["layers"] == found.layers
    again = LOAD(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(tokens()).logits, model(tokens()).logits)
    assert again.config.quantization_config.to_dict() == found.to_dict()


def test_targets_that_cannot_be_reached(dense):
    def load(**options):
        config = VQConfig(calibration=CALIBRATION, modules_to_not_convert=MLP, **options)
        return LOAD(dense("llama"), quantization_config=config)

    # Signs and codebooks weigh on layers this small.
    with pytest.raises(
        VQConfigError, match=r"target_bits=2.2 cannot be reached: .* store [2-4]\.\d+ bits"
    ):
        load(target_bits=2.2)


def test_inputs_that_are_not_finite(dense):
    model = LOAD(dense("llama"))
    ids = sample_text(model, 2, 32)
    blocks = Blocks(model, "model.layers", ids)
    model.lm_head.weight.data[3] = torch.nan
    config = VQConfig(target_bits=3)
    with (
        torch.no_grad(),
        pytest.raises(VQCalibrationError, match=r"predictions on the calib.* NaN"),
    ):
        weight_allocation.measure_costs(blocks, ids, [], config, None)
    blocks.model = model.model
    with pytest.raises(VQCalibrationError, match="LlamaModel returns no logits"):
        blocks.logits(ids[:1], blocks.hidden[0])
