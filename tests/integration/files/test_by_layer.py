"""Errors of single layers: a file next to config.json, which stays short."""

import json
import logging
import shutil

import pytest
from transformers import AutoConfig

from hf_vq import VQConfig
from hf_vq.cli import main
from hf_vq.evaluation.info import whole_provenance
from hf_vq.hf.checkpoint import by_layer
from tests.fixtures.checkpoints import LOAD

CALIBRATION = {"text": "model", "tokens": 128, "context": 32}


@pytest.fixture
def saved(quantized, tmp_path):
    """A quantized model that is saved now, and its folder."""
    model = LOAD(quantized())
    model.save_pretrained(tmp_path / "out")
    return model, tmp_path / "out"


def provenance(model):
    return model.config.quantization_config.provenance


def test_config_json_names_no_layer(saved):
    model, folder = saved
    assert len(provenance(model)["relative_error"]) == 14
    for text in (str(model.config), (folder / "config.json").read_text()):
        assert "self_attn" not in text and "relative_error" not in text
    again = LOAD(folder)
    assert provenance(again) == provenance(model)
    again.save_pretrained(folder)  # into the folder that it came from
    assert provenance(LOAD(folder)) == provenance(model)


def test_calibrated_errors_are_there_too(dense, tmp_path):
    config = VQConfig(calibration=CALIBRATION, activations=None)
    model = LOAD(dense("llama"), quantization_config=config)
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert stored["calibration"]["tokens"] == 128
    assert not {"output_error", "fallbacks"} & set(stored["provenance"]["calibration"])
    found = json.loads((tmp_path / by_layer.FILE).read_text())
    assert set(found["calibration"]) == {"output_error", "fallbacks"}
    assert provenance(LOAD(tmp_path)) == provenance(model)


def test_a_folder_of_an_older_version_has_all_in_config_json(saved, tmp_path, capsys):
    model, folder = saved
    config = json.loads((folder / "config.json").read_text())
    stored = config["quantization_config"]["provenance"]
    del stored[by_layer.DIGEST]
    stored["relative_error"] = provenance(model)["relative_error"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / by_layer.FILE).unlink()
    again = LOAD(folder)
    assert provenance(again) == provenance(model)
    assert main(["verify", str(folder)]) == 0
    again.save_pretrained(folder)
    assert "relative_error" not in (folder / "config.json").read_text()
    capsys.readouterr()
    assert main(["info", str(folder), "--json", "-"]) == 0
    assert len(json.loads(capsys.readouterr().out)["relative_error"]) == 7


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, None),
        ('{"relative_error": {}}', "is not what was saved"),
        ("[1]", "is not what was saved"),
        (b"\xff", "is not what was saved"),
    ],
)
def test_a_file_that_is_lost_or_changed(saved, caplog, capsys, text, why):
    """The model loads: a digest says that the errors are no longer those of its layers."""
    _, folder = saved
    if text is None:
        (folder / by_layer.FILE).unlink()
    else:
        (folder / by_layer.FILE).write_bytes(text if isinstance(text, bytes) else text.encode())
    with caplog.at_level(logging.WARNING):
        model = LOAD(folder)
    assert "relative_error" not in provenance(model)
    assert (why in caplog.text) if why else "hf_vq_provenance" not in caplog.text
    assert main(["verify", str(folder)]) == 1
    said = capsys.readouterr()
    assert f"{by_layer.FILE} {why or 'is missing'}" in said.out + said.err
    assert main(["info", str(folder)]) == 0
    model.save_pretrained(folder)
    assert main(["verify", str(folder)]) == 0


@pytest.mark.parametrize("text", ["[1]", "{}", '{"relative_error": 3}', "nonsense"])
def test_without_digests_nonsense_is_left_out_too(saved, monkeypatch, text):
    _, folder = saved
    (folder / by_layer.FILE).write_text(text)
    monkeypatch.setenv("HF_VQ_VERIFY", "0")
    assert "relative_error" not in provenance(LOAD(folder))


def test_a_stale_file_is_not_read(saved, quantized, tmp_path):
    """Of another model that was saved in the same folder, by a version without such a file."""
    _, folder = saved
    other = shutil.copytree(folder, tmp_path / "other")
    config = AutoConfig.from_pretrained(folder)
    config.quantization_config["provenance"].pop(by_layer.DIGEST)
    config.save_pretrained(other)
    assert "relative_error" not in provenance(LOAD(other))


def test_the_hub_has_it_and_a_load_fetches_it(saved, hub):
    model, _ = saved
    model.push_to_hub("me/model")
    again = LOAD("me/model")
    assert provenance(again) == provenance(model)
    stored = json.loads(hub.files["config.json"])["quantization_config"]["provenance"]
    errors = provenance(model)["relative_error"]
    assert whole_provenance("me/model", stored)["relative_error"] == errors
    del hub.files[by_layer.FILE]
    assert "relative_error" not in whole_provenance("me/other", stored)
