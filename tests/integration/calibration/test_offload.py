"""Calibration of a model that accelerate keeps on disk: the same codes, one block in memory."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_vq.calibration.blocks import Blocks
from hf_vq.hf import VQConfig
from hf_vq.nn import QuantizedModule
from tests.fixtures.tiny_models import tokens

pytest.importorskip("accelerate")
LOAD = AutoModelForCausalLM.from_pretrained
CALIBRATION = {"text": "model", "tokens": 128, "context": 32}
pytestmark = pytest.mark.filterwarnings(
    "ignore:Attempting to save a model with offloaded:UserWarning",
    "ignore:Current model requires:UserWarning",
)
ALL = {"": "disk"}
SECOND = {
    "model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu",
    "model.layers.0": "cpu", "model.layers.1": "disk",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "places", "scheme"),
    [
        ("llama", ALL, {"scheme": "vq-3"}),
        ("llama", SECOND, {"scheme": "vq-3"}),
        ("gpt2", ALL, {"scheme": "vq-4"}),
        ("gpt-oss", ALL, {"scheme": "vq-4"}),
        ("llama", ALL, {"target_bits": 3.5, "candidates": ["turboquant-2", "turboquant-4"]}),
    ],
)
def test_same_codes_as_in_memory(name, places, scheme, dense, tmp_path, monkeypatch):
    some = {"llama": ["mlp"], "gpt2": ["c_proj"], "gpt-oss": ["self_attn"]}[name]
    config = VQConfig(**scheme, calibration=CALIBRATION, modules_to_not_convert=some)
    whole = LOAD(dense(name), quantization_config=config)
    held = []  # blocks in memory when a block runs
    run = Blocks.run

    def counted(self, *arguments):
        if places is ALL:
            held.append(sum(not next(b.parameters()).is_meta for b in self.blocks))
        return run(self, *arguments)

    monkeypatch.setattr(Blocks, "run", counted)
    place = {"device_map": places, "offload_folder": tmp_path / "offload"}
    model = LOAD(dense(name), quantization_config=config, **place)
    assert set(held) == ({1} if places is ALL else set())
    coded = [m for m in model.modules() if isinstance(m, QuantizedModule)]
    assert any(p.is_meta for m in coded for p in m.parameters(recurse=False))
    with torch.no_grad():
        assert torch.equal(model(tokens()).logits, whole(tokens()).logits)
    model.save_pretrained(tmp_path / "saved")
    again = LOAD(tmp_path / "saved").state_dict()
    assert again.keys() == whole.state_dict().keys()
    assert all(torch.equal(part, again[key]) for key, part in whole.state_dict().items())
    expected, found = (m.config.quantization_config.to_dict() for m in (whole, model))
    assert found == expected
