"""The model card that is saved and pushed."""

import json
import re
import shutil
from unittest.mock import MagicMock

import pytest
import torch
import transformers
from huggingface_hub import ModelCard, ModelCardData, errors
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.hub import hf_api

from hf_vq import VQConfig, paths
from hf_vq.errors import VQError
from hf_vq.hf.checkpoint import by_layer
from hf_vq.hf.checkpoint.card import CARD, is_ours, loading_class
from hf_vq.hf.checkpoint.save import save_evaluation
from tests.fixtures import ROOT

LOAD = AutoModelForCausalLM.from_pretrained
FILES = {CARD, "config.json", "generation_config.json", "model.safetensors", by_layer.FILE}
CARDS = sorted((ROOT / "model_cards").glob("*.md"))


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
    assert data["library_name"] == "transformers" and data["pipeline_tag"] == "text-generation"
    assert "license" not in data, "of a model whose license nobody knows"
    assert {"hf_vq", "vq", "mine"} <= set(data["tags"])
    text = card.text
    assert 'AutoModelForCausalLM.from_pretrained("<this repository>")' in text
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["provenance"]
    assert f"{stored['bits_per_weight']:.3f}" in text and "`vq-4`, VQ<2,8,1>" in text
    assert "relative_error" not in stored
    errors = json.loads((tmp_path / "hf_vq_provenance.json").read_text())["relative_error"]
    assert len(errors) == 14
    for layer, error in errors.items():
        assert f"| `{layer}` | {100 * error:.3g} % |" in text


def test_the_class_that_loads():
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "vocab_size": 8}
    llama = transformers.LlamaConfig(intermediate_size=8, num_key_value_heads=1, **sizes)
    bert = transformers.BertConfig(intermediate_size=8, **sizes)
    t5 = transformers.T5Config(d_model=8, d_kv=8, d_ff=8, num_layers=1, num_heads=1, vocab_size=8)

    class Mine(transformers.LlamaForCausalLM):
        pass

    with torch.device("meta"):
        for config, name, loader in (
            (llama, "LlamaForCausalLM", "AutoModelForCausalLM"),
            (llama, "LlamaModel", "AutoModel"),
            (llama, "LlamaForSequenceClassification", "AutoModelForSequenceClassification"),
            (bert, "BertForMaskedLM", "AutoModelForMaskedLM"),
            (t5, "T5ForConditionalGeneration", "AutoModelForSeq2SeqLM"),
            (bert, "BertLMHeadModel", "AutoModelForCausalLM"),
        ):
            assert loading_class(getattr(transformers, name)(config)) == loader
        assert loading_class(Mine(llama)) == "AutoModel"


def test_license_and_language_are_those_of_the_original(dense, tmp_path):
    folder = tmp_path / "dense"
    shutil.copytree(dense("llama"), folder)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=VQConfig())
    facts = {"license": "other", "license_name": "mine", "language": ["en", "de"]}
    ModelCard(f"---\n{ModelCardData(**facts).to_yaml()}\n---\nwords").save(folder / CARD)
    model.save_pretrained(tmp_path / "saved")
    data = ModelCard.load(tmp_path / "saved" / CARD).data.to_dict()
    assert facts.items() <= data.items()
    (folder / CARD).write_text("---\n: [\n---\n")  # no card that can be read
    model.save_pretrained(tmp_path / "again")
    assert "license" not in ModelCard.load(tmp_path / "again" / CARD).data.to_dict()


def test_a_local_source_is_no_base_model(quantized):
    card = ModelCard.load(quantized() / CARD)
    data = card.data.to_dict()
    assert "base_model" not in data and "base_model_relation" not in data
    assert re.search(
        r"^# LlamaForCausalLM, quantized to \d\.\d\d bits per weight$", card.text, re.M
    )


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.stem)
def test_filled_cards_have_the_words_of_the_template(path):
    """Both ways: no line of the template is missing in a card, and a card has no other lines."""
    template = paths.card_template().read_text("utf-8")
    # These models were calibrated, which takes no activations, and do not chat.
    absent = r"{% if (activations|chats) %}.*?{% endif %}\n"
    template, count = re.subn(absent, "", template, flags=re.S)
    assert count == 2
    lines = template.splitlines()
    patterns = {
        ".+".join(re.escape(part) for part in re.split(r"{{.*?}}", line))
        for line in lines
        if not line.startswith("{%") and line not in ("", "{{ metadata }}")
    }
    card = path.read_text("utf-8")
    body = card[card.index("\n---\n") + 1 :].splitlines()
    matched = {line: {p for p in patterns if re.fullmatch(p, line)} for line in body if line}
    # `{{ marker }}` stands alone on its line: it may not vouch for other words.
    anything = {p for p in patterns if p == ".+"}
    assert len(anything) == 1 and is_ours(card)
    others = [line for line, by in matched.items() if by <= anything]
    assert len(others) == 1 and is_ours(others[0])
    assert set().union(*matched.values()) == patterns


TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}"


def test_a_source_that_is_gone(tinybooks, tmp_path):
    """A model is saved after the folder that it was loaded from was deleted."""
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(tinybooks, source)
    model = LOAD(source, quantization_config=VQConfig(activations=None))
    shutil.rmtree(source)
    model.save_pretrained(target)
    assert "apply_chat_template" not in (target / CARD).read_text()


@pytest.mark.parametrize("where", ["source", "target", "cache"])
def test_a_chat_example_that_runs(tinybooks, tmp_path, monkeypatch, capsys, where):
    """Where the tokenizer has a chat template, the card shows how to use it."""
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(tinybooks, source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = LOAD(source, quantization_config=VQConfig(activations=None))
    model.save_pretrained(target)
    assert "apply_chat_template" not in (target / CARD).read_text()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(target if where == "target" else source)
    if where == "cache":
        model.config.name_or_path = "someone/base"
        monkeypatch.setattr(
            "hf_vq.hf.checkpoint.card.try_to_load_from_cache",
            lambda _, name, **of: str(source / name),
        )
    model.save_pretrained(target)
    (example,) = re.findall(r"```python\n(.*?)```", (target / CARD).read_text(), re.S)
    tokenizer.save_pretrained(target)
    exec(example.replace("<this repository>", str(target)).replace("=200", "=3"), {})
    assert capsys.readouterr().out.strip()


FOUND = {"model": "base", "text": "t.txt", "text_sha256": "0a", "tokens": 2048, "context": 128}
FOUND |= {"perplexity": 21.5, "change": 1.25, "change_se": 0.1, "kld": 0.0125, "kld_se": 0.0003}
FOUND |= {"kld_p99": 0.123, "top1": 91.5, "top1_se": 0.2, "hf_vq": "9", "date": "2026-01-01"}


def test_what_was_measured_is_kept(model, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    model.save_pretrained(first)
    before = json.loads((first / "config.json").read_text())
    weights = (first / "model.safetensors").read_bytes()
    save_evaluation(model, first, FOUND)
    after = json.loads((first / "config.json").read_text())
    assert after["quantization_config"]["provenance"].pop("evaluation") == FOUND
    assert after == before and (first / "model.safetensors").read_bytes() == weights
    assert {path.name for path in first.iterdir()} == FILES
    LOAD(first).save_pretrained(second)
    for folder in (first, second):
        card = ModelCard.load(folder / CARD)
        results = {r.metric_type: r.metric_value for r in card.data.eval_results}
        assert results == {"perplexity": 21.5, "kld": 0.0125, "top1": 91.5}
        assert card.data.model_name == "base (vq-4)"
        assert "# someone/base, quantized to" in card.text
        assert "model-index:" in (folder / CARD).read_text()
        for text in ("21.500 (+1.25 % ± 0.10)", "0.01250 ± 0.00030", "2,048 tokens of t.txt"):
            assert text in card.text
    (first / CARD).write_text("My own words.")
    with pytest.raises(VQError, match="written by a person"):
        save_evaluation(model, first, FOUND)
    (first / "config.json").write_text("{}")
    with pytest.raises(VQError, match="not the folder of a model"):
        save_evaluation(model, first, FOUND)


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
    assert set(hub.files) == FILES
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
    assert set(hub.files) == FILES
    assert is_ours(hub.files[CARD].decode())
    model.save_pretrained(tmp_path / "out", push_to_hub=True, repo_id="me/x")
    assert len(hub.commits) == 2


def test_a_remote_card_written_by_a_person_stays(model, hub):
    hub.files[CARD] = b"---\nlicense: mit\n---\nMy own words."
    model.push_to_hub("me/x")
    assert [set(commit) for commit in hub.commits] == [FILES - {CARD}]
    assert b"My own words" in hub.files[CARD]


@pytest.mark.parametrize(
    ("error", "uploads"),
    [
        (errors.LocalEntryNotFoundError("offline"), False),
        (ConnectionError("no network"), False),
        (errors.HfHubHTTPError("500", response=MagicMock()), False),
        (errors.RemoteEntryNotFoundError("404", response=MagicMock()), True),
    ],
)
def test_a_remote_card_that_cannot_be_read_stays(model, hub, monkeypatch, error, uploads):
    def download(*arguments, **options):
        raise error

    monkeypatch.setattr(type(hf_api()), "hf_hub_download", download)
    model.push_to_hub("me/x")
    assert (CARD in hub.files) == uploads
