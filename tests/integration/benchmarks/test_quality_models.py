"""The suite on any model: its rows, what it keeps, and what its simulations are."""

import json

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig

from benchmarks.__main__ import main
from benchmarks.quality import baselines
from benchmarks.quality.models import caches, suite, texts, weights
from benchmarks.quality.models.suite import Options
from hf_vq.errors import VQError
from hf_vq.evaluation import score as scores
from hf_vq.evaluation.load import load_model, load_tokenizer

ROWS = ["kv:u4", "kv:u4-window-0", "kv:kivi-4-g32", "kv:u4@256", "passkey:exact@128",
        "weights:nf4-g64", "weights:q4_0"]  # fmt: skip
SMALL = ("--tokens 128 --context 64 --kv-passages 2 --kv-prompt 96 --kv-scored 32 --kv-long 256 "
         "--kv-long-passages 2 --passkeys 128 --revision here")  # fmt: skip


def run(model, text, out, *more):
    arguments = ["quality-models", str(model), "--text", str(text), "--out", str(out)]
    assert main([*arguments, *SMALL.split(), *more]) == 0
    (path,) = out.glob("*.jsonl")
    head, *rows = map(json.loads, path.read_text().splitlines())
    return head, rows


def test_rows_are_recorded_and_taken_up(tiny_model, eval_text, tmp_path, capsys, monkeypatch):
    head, rows = run(tiny_model, eval_text, tmp_path, "--rows", *ROWS)
    assert head["complete"]
    assert head["settings"]["text_scored"] == 2 * 63
    assert [suite.row_name(row) for row in rows] == ROWS
    assert all(row["revision"] == "here" for row in rows)
    assert "--ggml" in rows[-1]["failed"]
    assert rows[0]["bits_per_element"] == 4.5
    assert 0 < rows[0]["kld"] < 0.1
    assert rows[1]["kld"] > rows[0]["kld"], "more tokens are codes"
    assert rows[3]["length"] == 256 and rows[3]["kld"] > 0
    assert rows[5]["on"] == "text"
    capsys.readouterr()
    monkeypatch.setattr(suite.ModelSuite, "_cache", lambda *_: pytest.fail("measured again"))
    taken_up, again = run(tiny_model, eval_text, tmp_path, "--rows", *ROWS, "--resume")
    assert "1 of 1 rows" in capsys.readouterr().out, "the row that failed is tried again"
    assert again == rows
    assert taken_up["results"] == head["results"] and head["results"]["perplexity"]["text"] > 1


def test_other_texts_or_revisions_are_measured_anew(tiny_model, eval_text, tmp_path, capsys):
    options = ("--rows", "weights:nf4-g64", "--resume")
    run(tiny_model, eval_text, tmp_path, *options)
    run(tiny_model, eval_text, tmp_path, *options, "--tokens", "192")
    run(tiny_model, eval_text, tmp_path, *options, "--tokens", "192", "--revision", "there")
    run(tiny_model, eval_text, tmp_path, *options, "--tokens", "192", "--revision", "there")
    assert capsys.readouterr().out.count("weights:nf4-g64 on text") == 3


@pytest.mark.parametrize("revision", ["here", "there"])
def test_other_rows_of_a_revision_are_kept(tiny_model, eval_text, tmp_path, revision):
    """Once, also if it is the revision that is measured."""
    _, [first] = run(tiny_model, eval_text, tmp_path, "--rows", "weights:nf4-g64")
    options = ("--rows", "kv:u4", "--revision", revision, "--resume", "--keep", "here")
    _, rows = run(tiny_model, eval_text, tmp_path, *options)
    assert [row["name"] for row in rows] == ["u4", "nf4-g64"] and rows[1] == first
    assert [row["revision"] for row in rows] == [revision, "here"]


def test_rows_without_a_text_to_learn_from_are_kept(tiny_model, eval_text, tmp_path):
    wanted = ("--rows", "weights:nf4-g64", "weights:gptq-4-g128")
    first = run(tiny_model, eval_text, tmp_path, *wanted)[1]
    assert "failed" in first[1], "it learns"
    learns = ("--resume", "--calibration", str(eval_text), "--calibration-tokens", "128")
    record, rows = run(tiny_model, eval_text, tmp_path, *wanted, *learns)
    assert rows[0] == first[0] and "failed" not in rows[1]
    assert record["settings"]["calibration_tokens"] == 128
    _, [anew] = run(tiny_model, eval_text, tmp_path, "--rows", "weights:nf4-g64", "--resume")
    assert anew["name"] == "nf4-g64", "not the other way round: a row that learnt is not kept"


@pytest.mark.parametrize("option", ["--kv-passages", "--kv-long-passages"])
def test_one_passage_is_refused(tiny_model, eval_text, capsys, option):
    arguments = ["quality-models", str(tiny_model), "--text", str(eval_text), option, "1"]
    assert main(arguments) == 2
    assert option in capsys.readouterr().err


def test_rows_that_nothing_matches_are_refused(tiny_model, eval_text, capsys):
    arguments = ["quality-models", str(tiny_model), "--text", str(eval_text), "--rows", "nf4"]
    assert main(arguments) == 2
    assert "no row matches nf4" in capsys.readouterr().err


def test_a_package_that_is_missing_is_named(tiny_model, eval_text, monkeypatch):
    monkeypatch.setattr("sys.modules", {**__import__("sys").modules, "hqq": None})
    options = Options(text=eval_text, tokens=128, context=64)
    (row,) = suite.ModelSuite(str(tiny_model), options).measure("weights:hqq-4-g64")
    assert "hqq" in row["failed"]


def test_simulated_caches_round_what_is_old():
    """By brute force, whatever the steps."""
    k, v = torch.randn(2, 1, 2, 200, 16)
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=2, head_dim=16, hidden_size=32)
    cache = caches._simulated(torch.round, lambda x: 2 * x, 32, config)
    for part in (slice(0, 150), *(slice(i, i + 5) for i in range(150, 200, 5))):
        keys, values = cache.update(k[:, :, part], v[:, :, part], 0)
    coded = slice(caches.SINKS, caches.SINKS + (200 - caches.SINKS - caches.WINDOW) // 32 * 32)
    expected = k.clone(), v.clone()
    expected[0][:, :, coded] = k[:, :, coded].round()
    expected[1][:, :, coded] = 2 * v[:, :, coded]
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])


def test_only_answers_are_scored(tiny_model, tmp_path):
    """Answers are written once; predictions of a prompt's tokens do not count."""
    model, tokenizer = load_model(str(tiny_model)), load_tokenizer(str(tiny_model))
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}: "
    prompts = tmp_path / "prompts.jsonl"
    asked = ["Tell me a story.", "Why?", "Name the largest town of them all."]
    prompts.write_text("\n".join(json.dumps({"turns": [one]}) for one in asked))
    arguments = (model, tokenizer, str(tiny_model), prompts, tmp_path / "kept", 96, 48)
    found = texts.chat(*arguments)
    assert torch.equal(texts.chat(*arguments).ids, found.ids)
    assert found.ids.shape == (2, 48)
    reference = scores.Reference(scores.model_forward(model), found.ids, skip=found.skip)
    for row, skip in enumerate(found.skip):
        assert len(reference[row].probabilities) == 47 - skip
        ends = tokenizer(asked[row] + ": ", add_special_tokens=False).input_ids
        assert found.ids[row, : skip + 1].tolist() == ends
    with pytest.raises(VQError, match="answers reach"):
        texts.chat(*arguments[:5], 48 * 4, 48)


def test_awq_beats_integers_where_inputs_are_uneven():
    x = torch.randn(512, 256) * torch.where(torch.arange(256) % 64 == 0, 30.0, 1.0)
    weight, moments = torch.randn(64, 256), x.T @ x / len(x)

    def loss(rounded):
        return ((rounded - weight) @ x.T).square().mean()

    plain = baselines.searched_integers(weight, 4, 128)
    assert loss(baselines.awq(weight, moments, 4)) < loss(plain)


def test_searched_integers_are_no_worse_and_take_any_width():
    weight = torch.randn(32, 192)
    searched = baselines.searched_integers(weight[:, :128], 3, 128)
    plain = baselines.round_to_nearest(weight[:, :128], 3)
    errors = [(one - weight[:, :128]).square().mean() for one in (searched, plain)]
    assert errors[0] < errors[1]
    whole = baselines.searched_integers(weight, 3, 128)
    assert torch.equal(whole[:, :128], searched)
    assert len(whole[0, 128:].unique()) <= 8


def test_importance_is_the_energy_of_inputs(tiny_model):
    model = load_model(str(tiny_model), dtype=torch.float32)
    ids = torch.randint(8, 200, (2, 16))
    job = weights.Job(str(tiny_model), model, ids)
    hidden = model.model(ids, output_hidden_states=True).hidden_states[0]
    x = model.model.layers[0].input_layernorm(hidden).detach()
    found = job.importance["model.layers.0.self_attn.q_proj"] / len(ids)
    torch.testing.assert_close(found, x.flatten(0, 1).square().mean(0))
    assert "lm_head" not in job.importance


def test_the_tokenizer_begins_passages(tiny_model, eval_text):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    ids = texts.natural(tokenizer, eval_text, 128, 32).ids
    assert ids.shape == (4, 32)
    assert not torch.equal(ids[0], ids[1])
