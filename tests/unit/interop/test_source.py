"""The folder that is converted may come from anybody."""

import json

import pytest
from huggingface_hub import constants

from hf_vq.errors import VQConfigError, VQError, VQFormatError
from hf_vq.interop.convert import convert
from hf_vq.interop.source import copy_others, read_json, source_folder, weight_files


@pytest.fixture
def folder(tmp_path):
    found = tmp_path / "model"
    found.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "notes.txt"):
        (found / name).write_text("{}")
    return found


@pytest.mark.parametrize("name", ["notes.txt", "config.json", "model.safetensors", "key.pem"])
def test_a_link_to_somewhere_else_is_refused(folder, tmp_path, name):
    (tmp_path / "private").write_text("secret")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "private")
    out = tmp_path / "out"
    with pytest.raises(VQConfigError, match=rf"{name} is a link to .*private.*Remove the link"):
        convert(str(folder), str(out))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "private"]


def test_a_link_over_another_link_is_refused(folder, tmp_path):
    (tmp_path / "private").write_text("secret")
    (folder / "notes.txt").unlink()
    (folder / "sub").mkdir()
    (folder / "sub" / "there").symlink_to(tmp_path / "private")
    (folder / "notes.txt").symlink_to(folder / "sub" / "there")
    with pytest.raises(VQConfigError, match=r"notes\.txt is a link"):
        source_folder(str(folder))


def test_links_within_the_folder_are_followed(folder, tmp_path):
    (folder / "copy.json").symlink_to("tokenizer.json")
    (tmp_path / "name").symlink_to(folder)  # so may be the folder itself
    assert source_folder(str(tmp_path / "name")) == tmp_path / "name"


@pytest.mark.parametrize("in_hub", [True, False])
def test_snapshots_of_a_hub_cache_are_links(tmp_path, monkeypatch, in_hub):
    """Of the user's cache, or of one in another place."""
    cache = tmp_path / "cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache if in_hub else tmp_path / "other"))
    snapshot = cache / "models--me--model" / "snapshots" / "0123"
    blobs = cache / "models--me--model" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "abc").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    assert source_folder(str(snapshot)) == snapshot
    (tmp_path / "private").write_text("secret")
    (blobs / "abc").unlink()
    (blobs / "abc").symlink_to(tmp_path / "private")
    with pytest.raises(VQConfigError, match=r"config\.json is a link"):
        source_folder(str(snapshot))


def test_only_what_a_model_needs_is_copied(folder, tmp_path, caplog):
    for name in ("modeling_evil.py", "install.sh", ".env", ".env.json", "LICENSE", "README.md",
                 "tokenizer.model", "chat_template.jinja", "pytorch_model.bin"):  # fmt: skip
        (folder / name).write_text("x")
    (folder / "more").mkdir()
    out = tmp_path / "out"
    out.mkdir()
    copy_others(folder, out, but=("config.json",))
    assert {path.name for path in out.iterdir()} == {
        "tokenizer.json", "notes.txt", "LICENSE", "README.md", "tokenizer.model",
        "chat_template.jinja",
    }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "[]", "[1]", "[" * 5000, "{", "\xff", "null",
        *(json.dumps({"weight_map": value}) for value in (
            None, [], [1], {}, 7, "a", {"a": 1}, {"a": None}, {"a": ["b"]}, {"a": {}}, {"a": ""},
            {"a": "../b.safetensors"}, {"a": "/etc/passwd"}, {"a": "b.safetensors", "c": 2},
            {"a": "\0"}, {"a": "absent.safetensors"}, {"a": "x" * 9999},
        )),
    ],
)  # fmt: skip
def test_an_index_of_nonsense(folder, text):
    index = folder / "model.safetensors.index.json"
    index.write_bytes(text.encode("latin-1"))
    with pytest.raises(VQFormatError, match=r"index\.json|lacks"):
        weight_files(folder)


@pytest.mark.parametrize("text", ["[]", "[" * 5000, "{", "\xff", '{"a":' * 5000])
def test_json_of_nonsense(folder, text):
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(VQFormatError, match=r"config\.json cannot be read"):
        read_json(folder / "config.json")


@pytest.mark.parametrize(
    "quantization",
    [
        None, [], 7, "aqlm", {}, {"quant_method": ["aqlm"]}, {"quant_method": {"a": 1}},
        {"quant_method": None}, {"quant_method": "gptq"}, {"quant_method": "aqlm"},
        {"quant_method": "aqlm", "in_group_size": [8]}, {"quant_method": "vptq", "config": 1},
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "model",
    [{}, {"model_type": 7}, {"model_type": "llama", "hidden_size": "x"}, {"model_type": ["llama"]},
     {"model_type": "llama", "num_hidden_layers": 1 << 31},
     {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8, "vocab_size": 8,
      "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}],
)  # fmt: skip
def test_a_config_of_nonsense(folder, tmp_path, quantization, model):
    config = {**model, "quantization_config": quantization, "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    header = json.dumps({"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(VQError):
        convert(str(folder), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
