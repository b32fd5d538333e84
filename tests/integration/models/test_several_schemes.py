"""Several schemes in one model: what is recorded, saved, shown and read again."""

import json

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from hf_vq.errors import VQConfigError
from hf_vq.evaluation.info import describe, show
from hf_vq.formats.catalog import weight_scheme
from hf_vq.hf import VQConfig, explain
from hf_vq.hf.checkpoint.headers import storage
from hf_vq.nn.replace import vq_modules
from tests.fixtures.tiny_models import tokens

LOAD = AutoModelForCausalLM.from_pretrained


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3-moe"])
def test_every_layer_has_its_scheme_also_when_read_again(name, dense, tmp_path):
    entries = {"gpt2": {"h.1": "vq-3", "c_attn": "turboquant-8"}, "qwen3-moe": {"experts": "vq-3"}}
    layers = entries.get(name, {"layers.0.mlp": "turboquant-8", "down_proj": "vq-3"})
    config = VQConfig("vq-4", layers=layers)
    model = LOAD(dense(name), quantization_config=config)
    assert config.layers.keys() == layers.keys(), "the user's is left alone"
    schemes = {key: module.scheme for key, module in vq_modules(model).items()}
    found = model.config.quantization_config
    assert all(scheme == config.scheme_of(key) for key, scheme in schemes.items())
    assert len(set(schemes.values())) == len(set(config.schemes()))
    others = {key: s.spec() for key, s in schemes.items() if s != weight_scheme("vq-4")}
    assert found.layers == others and found.format_version == 2
    model.save_pretrained(tmp_path / "saved")
    again, info = LOAD(tmp_path / "saved", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)
    assert again.config.quantization_config.to_dict() == found.to_dict()
    body = AutoModel.from_pretrained(tmp_path / "saved")  # names without their prefix
    assert {module.scheme for module in vq_modules(body).values()} == set(schemes.values())
    card = (tmp_path / "saved" / "README.md").read_text()
    assert f"`vq-3`, VQ<2,6,1>, in {sum('vq2x6' in s for s in others.values())} layers" in card
    about = describe(str(tmp_path / "saved"))
    bits, weights = storage(model)
    assert about["bits_per_weight"] == pytest.approx(bits / weights, rel=1e-3)
    assert about["layers"] == others and "vq-3 in " in show(about)
    asked = {row.problem.scheme: row for row in explain(model)}
    assert set(asked) == {scheme.spec() for scheme in schemes.values()}


def test_an_older_version_says_what_to_do(dense, tmp_path, monkeypatch):
    """It reads format_version first: newer is an error that says so."""
    model = LOAD(dense("llama"), quantization_config=VQConfig(layers={"mlp": "vq-3"}))
    model.save_pretrained(tmp_path)
    monkeypatch.setattr("hf_vq.hf.config.FORMAT_VERSION", 1)
    with pytest.raises(VQConfigError, match=r"format_version 2 is newer.*pip install -U"):
        LOAD(tmp_path)


def test_an_edited_table_does_not_load(dense, tmp_path):
    model = LOAD(dense("llama"), quantization_config=VQConfig(layers={"mlp": "vq-3"}))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]["layers"]["model.layers.0.mlp.up_proj"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Exception, match=r"layers\.0\.mlp\.up_proj"):
        LOAD(tmp_path)


def test_entries_that_mean_no_layer(dense):
    with pytest.raises(VQConfigError, match="layers: 'mpl' matches no module of Llama"):
        LOAD(dense("llama"), quantization_config=VQConfig(layers={"mpl": "vq-3"}))
    with pytest.raises(VQConfigError, match="layers: 'embed_tokens' matches no"):
        LOAD(dense("llama"), quantization_config=VQConfig(layers={"embed_tokens": "vq-3"}))
