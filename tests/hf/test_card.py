"""The model card that is saved and pushed."""

import json

import pytest
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from hf_vq.hf.card import CARD, is_ours

LOAD = AutoModelForCausalLM.from_pretrained


@pytest.fixture
def model(quantized):
    model = LOAD(quantized())
    model.config.quantization_config.provenance["base_model"] = "someone/base"
    return model


def test_what_it_says(model, tmp_path):
    model.add_model_tags(["mine"])
    model.save_pretrained(tmp_path)
    card = ModelCard.load(tmp_path / CARD)
    data = card.data.to_dict()
    assert data["base_model"] == "someone/base"
    assert data["base_model_relation"] == "quantized"
    assert data["library_name"] == "transformers"
    assert {"hf_vq", "vq", "mine"} <= set(data["tags"])
    text = card.text
    assert 'AutoModelForCausalLM.from_pretrained("<this repository>")' in text
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["provenance"]
    assert f"{stored['bits_per_weight']:.3f}" in text and "`vq-4`, VQ<2,8,1>" in text
    for layer, error in stored["relative_error"].items():
        assert f"| `{layer}` | {100 * error:.3g} % |" in text


def test_a_local_source_is_no_base_model(quantized):
    data = ModelCard.load(quantized() / CARD).data.to_dict()
    assert "base_model" not in data and "base_model_relation" not in data


def test_a_card_written_by_a_person_stays(model, tmp_path):
    model.save_pretrained(tmp_path)
    path = tmp_path / CARD
    assert is_ours(path.read_text())
    model.add_model_tags(["second"])
    model.save_pretrained(tmp_path)
    assert "second" in path.read_text()  # ours is written anew
    path.write_text("My own words.")
    model.save_pretrained(tmp_path)
    assert path.read_text() == "My own words."


def test_push_to_hub(model, hub, tmp_path):
    model.push_to_hub("me/x", tags=["mine"])
    assert set(hub.files) == {CARD, "config.json", "generation_config.json", "model.safetensors"}
    assert len(hub.commits) == 1
    card = ModelCard(hub.files[CARD].decode())
    assert card.data.to_dict()["base_model_relation"] == "quantized"
    assert "mine" in card.data.tags
    for name, data in hub.files.items():
        (tmp_path / name).write_bytes(data)
    again = LOAD(tmp_path)
    assert again.config.quantization_config.to_dict() == model.config.quantization_config.to_dict()


def test_push_to_hub_while_saving(model, hub, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old.txt").write_text("not to be pushed")
    model.save_pretrained(tmp_path / "out", push_to_hub=True, commit_message="one")
    assert set(hub.files) == {CARD, "config.json", "generation_config.json", "model.safetensors"}
    assert is_ours(hub.files[CARD].decode())
    model.save_pretrained(tmp_path / "out", push_to_hub=True, repo_id="me/x")
    assert len(hub.commits) == 2


def test_a_remote_card_written_by_a_person_stays(model, hub):
    hub.files[CARD] = b"---\nlicense: mit\n---\nMy own words."
    model.push_to_hub("me/x")
    assert [sorted(commit) for commit in hub.commits] == [
        ["config.json", "generation_config.json", "model.safetensors"]
    ]
    assert b"My own words" in hub.files[CARD]
