"""`hf-vq`, verb by verb, on a tiny model; the demo on the embedded one."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
)

from hf_vq import VQCache, calibrate_kv
from hf_vq.backends.cpu import library
from hf_vq.cache import KVCodebooks
from hf_vq.cli import build_parser, main
from hf_vq.evaluation import demo
from hf_vq.evaluation.storage import Entry, file_storage, model_storage
from hf_vq.formats import KV_SCHEMES, VQScheme
from hf_vq.nn.replace import vq_modules
from tests.fixtures import ROOT


@pytest.fixture(scope="module")
def original(tmp_path_factory, tinybooks) -> Path:
    """A random Llama whose rows do not all divide by 128, with a tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=8192,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=2,
    )
    folder = tmp_path_factory.mktemp("cli") / "original"
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tinybooks / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def quantized(original) -> Path:
    out = original.with_name("quantized")
    assert main(["quantize", str(original), str(out), "--scheme", "vq-3"]) == 0
    return out


def test_quantize_saves_what_loads(quantized, original, capsys):
    model = AutoModelForCausalLM.from_pretrained(quantized)
    assert model.config.quantization_config.scheme_name == "vq-3"
    assert (quantized / "tokenizer.json").is_file()
    leftovers = {path.name for path in original.parent.iterdir()}
    assert leftovers == {"original", "quantized"}


def test_quantize_takes_bits_and_an_embedding_of_integers(original, tmp_path, capsys):
    command = ["quantize", str(original), str(tmp_path / "out"), "--activations", "none"]
    assert main([*command, "--bits", "8", "--embeddings", "int8"]) == 0
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.quantization_config
    assert (stored.scheme_name, stored.embeddings) == ("turboquant-8", "int8")
    command[2] = str(tmp_path / "other")
    with pytest.raises(SystemExit):
        main([*command, "--bits", "8", "--scheme", "vq-3"])
    assert "not allowed with" in capsys.readouterr().err
    assert "bits must be an integer in" in wrong(*command, "--bits", "9", capsys=capsys)


def test_export_saves_the_decoded_weights(quantized, original, tmp_path, capsys):
    out = tmp_path / "dense"
    assert main(["export", str(quantized), str(out)]) == 0
    assert f"in float32 in {out}" in capsys.readouterr().out
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert (out / "tokenizer.json").is_file()
    plain = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    coded = AutoModelForCausalLM.from_pretrained(quantized).dequantize()
    assert not any(plain[1].values()) and not vq_modules(plain[0])
    for name, tensor in coded.state_dict().items():
        assert torch.equal(plain[0].state_dict()[name], tensor), name
    assert main(["export", str(quantized), str(out)]) == 2  # OUT exists
    assert main(["export", str(original), str(tmp_path / "again")]) == 2
    assert "there is nothing to decode" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


def test_quantize_prints_bits_and_errors(original, tmp_path, capsys):
    out = tmp_path / "out"
    skip = ["--skip", "mlp.down_proj"]
    assert main(["quantize", str(original), str(out), "--dtype", "float32", *skip]) == 0
    shown = capsys.readouterr().out
    assert "self_attn.q_proj" in shown and "relative error" in shown
    assert "bits per quantized weight, " in shown and "nominal" not in shown
    assert main(["info", str(out), "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "mlp.down_proj" in {kind["name"] for kind in found["kept"]}
    assert "mlp.down_proj" not in {kind["name"] for kind in found["quantized"]}


def test_info_reads_headers_only(quantized, capsys, tmp_path):
    out = tmp_path / "info.json"
    assert main(["info", str(quantized), "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "vq-3" in shown and "mlp.gate_proj" in shown and "format version    1" in shown
    found = json.loads(out.read_text())
    model = AutoModelForCausalLM.from_pretrained(quantized)
    storage = model_storage(model)
    assert found["bits_per_weight"] == pytest.approx(storage.bits_per_weight, abs=1e-3)
    assert found["bytes"] == storage.nbytes
    assert sum(kind["weights"] for kind in found["quantized"]) == storage.weights
    assert set(found["relative_error"]) == {kind["name"] for kind in found["quantized"]}
    assert all(0 < error < 0.1 for error in found["relative_error"].values())


def test_info_of_a_model_that_is_not_quantized(original, capsys):
    assert main(["info", str(original)]) == 0
    assert "none" in capsys.readouterr().out


@pytest.mark.parametrize("length", [48, 96, 160, 416, 1376])
@pytest.mark.parametrize("name", ["vq-4", "vq-3", "aqlm-3", "quip-sharp-2", "turboquant-3"])
def test_header_arithmetic(length, name):
    from hf_vq.formats.catalog import weight_scheme
    from hf_vq.formats.tensors import tensor_specs

    scheme: VQScheme = weight_scheme(name)
    specs = tensor_specs(scheme, 24, length)
    names = {"codes": "m.layers.0.p.weight"}
    entries = [
        Entry(
            spec.shared_name or names.get(key, f"m.layers.0.p.vq_{key}"),
            "U8" if spec.dtype == torch.uint8 else "F16",
            spec.shape,
        )
        for key, spec in specs.items()
    ]
    storage = file_storage(entries, lambda layer: scheme)
    assert storage.weights == 24 * length and not storage.kept
    total = sum(torch.Size(s.shape).numel() * s.dtype.itemsize for s in specs.values())
    assert storage.nbytes == total


def test_eval_against_the_original(quantized, original, eval_text, capsys, tmp_path):
    out = tmp_path / "eval.json"
    small = ["--text", eval_text, "--tokens", "320", "--context", "160"]
    arguments = ["eval", str(quantized), "--reference", str(original), *small]
    assert main([*arguments, "--cache", "u4", "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    for line in ("KL divergence", "top-1 agreement", "tokens/s", "bits per KV element"):
        assert line in shown
    found = json.loads(out.read_text())
    assert found["score"]["kld"] > 0 and found["tokens"] == 320 and found["skipped"] == 68
    options = "--reference MODEL --text TEXT --tokens 320 --context 160 --cache u4"
    assert found["command"] == f"hf-vq eval MODEL {options}"
    assert found["bits_per_kv_element"] == pytest.approx(4.5)  # 16 bits of scale for 32 numbers
    assert 3 < found["bits_per_weight"] < 4.5 and "cpu" in found["machine"]
    assert str(original.parent) not in out.read_text()
    assert main(["eval", str(original), *small, "--json", "-"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["score"] is None and alone["perplexity"] > 1


def test_eval_writes_the_card(quantized, original, eval_text, tmp_path, capsys):
    out = shutil.copytree(quantized, tmp_path / "out")
    small = ["--text", eval_text, "--tokens", "320", "--context", "160", "--card"]
    assert main(["eval", str(out), *small]) == 2
    assert "give a reference" in capsys.readouterr().err
    assert main(["eval", str(original), "--reference", str(original), *small]) == 2
    assert "not the folder of a model that hf_vq quantized" in capsys.readouterr().err
    assert main(["eval", str(out), "--reference", str(original), *small, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    card = (out / "README.md").read_text()
    assert f"| KL divergence, mean | {found['score']['kld']:.5f} ±" in card
    assert "metrics:" in card and "type: perplexity" in card
    stored = json.loads((out / "config.json").read_text())["quantization_config"]["provenance"]
    assert stored["evaluation"]["kld"] == found["score"]["kld"]
    assert str(tmp_path) not in card


@pytest.fixture(scope="module")
def eval_text(tinybooks) -> str:
    return str(tinybooks.with_name("tinybooks-5m-eval.txt"))


@pytest.fixture
def copied(original, tmp_path) -> Path:
    """The original model in a folder of its own."""
    return Path(shutil.copytree(original, tmp_path / "model"))


CALIBRATION = ["--tokens", "320", "--context", "64"]


def test_calibrate_saves_what_a_cache_finds(copied, eval_text, capsys):
    arguments = ["calibrate", str(copied), "--kv", "nomad-4", "--text", eval_text, *CALIBRATION]
    before = {path.name for path in copied.iterdir()}
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    path = copied / "kv_codebooks.safetensors"
    assert shown.startswith("nomad-4: codebooks of keys in 2 layers, ") and str(path) in shown
    assert {path.name for path in copied.iterdir()} == before | {path.name}, "nothing else is left"
    model = AutoModelForCausalLM.from_pretrained(copied)
    cache = VQCache.from_pretrained(model)
    assert cache.options.scheme == KV_SCHEMES["nomad-4"]
    text = Path(eval_text).read_text(encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(copied)
    again = calibrate_kv(model, "nomad-4", text, tokenizer, tokens=320, context=64)
    stored = KVCodebooks.load(path)
    assert all(torch.equal(a, b) for a, b in zip(stored.keys, again.keys, strict=True))
    small = ["--text", eval_text, "--tokens", "320", "--context", "160", "--json", "-"]
    assert main(["eval", str(copied), *small, "--cache", "nomad-4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        found["bits_per_kv_element"] == pytest.approx((4 + 4.5) / 2) and found["score"]["kld"] > 0
    )


def test_calibrate_chooses_schemes_of_layers(copied, eval_text, capsys):
    arguments = ["calibrate", copied, "--kv", "2.5", "--text", eval_text]
    assert main([*map(str, arguments), "--tokens", "256", "--context", "128"]) == 0
    assert capsys.readouterr().out.startswith("one scheme for each of 2 layers: means of keys in 2")
    cache = VQCache.from_pretrained(copied)
    parts = [part for layer in cache.layers for part in (layer.scheme.key, layer.scheme.value)]
    assert sum(part.entry_bits / part.vector_size for part in parts) == 4 * 2.5


def test_calibrate_replaces_only_when_told(copied, eval_text, tmp_path, capsys):
    arguments = ["calibrate", copied, "--text", eval_text, *CALIBRATION]
    path = copied / "kv_codebooks.safetensors"
    path.write_bytes(b"other")
    assert "--force" in wrong(*arguments, "--kv", "u4", capsys=capsys)
    assert "not for its mean bits" in wrong(*arguments, "--kv", "3", "--sinks", "0", capsys=capsys)
    weights = ["calibrate", copied, tmp_path / "out", "--scheme", "vq-4", "--sinks", "0"]
    assert "--sinks is for --kv" in wrong(*weights, capsys=capsys)
    assert path.read_bytes() == b"other"
    more = ["--kv", "u4", "--force", "--seed", "1", "--sinks", "0"]
    assert main([*map(str, arguments), *more]) == 0
    assert KVCodebooks.load(path).sinks == 0
    assert "u4: means of keys in 2 layers" in capsys.readouterr().out
    assert KVCodebooks.load(path).key_means[0].shape == (2, 32)
    elsewhere = tmp_path / "new" / "folder"
    arguments[2:2] = [elsewhere]
    assert main([*map(str, arguments), "--kv", "nomad-2"]) == 0
    assert [path.name for path in elsewhere.iterdir()] == ["kv_codebooks.safetensors"]


def test_calibrate_without_text(copied, capsys):
    """The model writes it."""
    tokens = ["--tokens", "128", "--context", "32"]
    assert main(["calibrate", str(copied), "--kv", "nomad-2", *tokens]) == 0
    assert (copied / "kv_codebooks.safetensors").is_file()


def test_calibrate_says_what_is_wrong(copied, eval_text, tmp_path, capsys):
    def fails(*arguments):
        return wrong("calibrate", *arguments, capsys=capsys)

    text = ["--text", eval_text]
    assert "Did you mean 'nomad-4'" in fails(copied, "--kv", "nomad4", *text)
    assert "not a directory" in fails("someone/model", "--kv", "u4", *text)
    assert "config.json" in fails(tmp_path, "--kv", "u4", *text)
    assert "cannot read" in fails(copied, "--kv", "u4", "--text", tmp_path / "no.txt")
    short = tmp_path / "short.txt"
    short.write_text("too short a text")
    assert "too short" in fails(copied, "--kv", "u4", "--text", short)
    assert "at least 2048" in fails(copied, "--kv", "cq-2", *text, *CALIBRATION)
    assert "more than the 2048" in fails(copied, "--kv", "u4", *text, "--context", "4096")
    file = tmp_path / "a_file"
    file.write_text("")
    assert "cannot make" in fails(copied, file / "x", "--kv", "u4", *text, *CALIBRATION)
    assert not (copied / "kv_codebooks.safetensors").exists()


def test_an_interrupted_calibration_leaves_nothing(copied, eval_text, monkeypatch, capsys):
    """Whether it records, fits or writes; what was there stays."""
    before = {path: path.read_bytes() for path in copied.iterdir()}
    arguments = ["calibrate", str(copied), "--kv", "nomad-4", "--text", eval_text, *CALIBRATION]
    steps = ("run_recorded", "fit_kv_codebook")
    places = (*(f"hf_vq.calibration.kv_codebooks.{step}" for step in steps), "os.replace")

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    for place in places:
        with monkeypatch.context() as patch:
            patch.setattr(place, interrupt)
            assert main(arguments) == 1
        assert "nothing was left behind" in capsys.readouterr().err
        assert {path: path.read_bytes() for path in copied.iterdir()} == before


def test_calibrated_weights(original, eval_text, tmp_path, monkeypatch, capsys):
    """Interrupted after its first block, the same command goes on; nothing is left of the work."""
    out = tmp_path / "out"
    # The slash does not move the work into OUT.
    arguments = ["calibrate", str(original), f"{out}/", "--scheme", "vq-3", "--text", eval_text]
    arguments += CALIBRATION
    replace, work = os.replace, tmp_path / "out.unfinished"

    def interrupt(source, target):
        replace(source, target)
        if str(target).endswith("block-0.safetensors"):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupt)
        assert main(arguments) == 1
    assert f"goes on from {work}" in capsys.readouterr().err and not out.exists()
    assert "something else" in wrong(*arguments, "--seed", "1", capsys=capsys)
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "bits per quantized weight, " in shown and "of outputs" in shown
    assert main(["info", str(out), "--json", "-"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert all(0 < error < 0.1 for error in info["output_error"].values())
    assert info["provenance"]["calibration"]["tokens"] == 320
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    found = AutoModelForCausalLM.from_pretrained(out).config.quantization_config
    assert found.calibration["text"] == Path(eval_text).name
    assert found.calibration["tokens"] == 320
    assert "exists" in wrong(*arguments, capsys=capsys)
    assert "needs OUT" in wrong("calibrate", original, "--scheme", "vq-3", capsys=capsys)
    other = ["calibrate", original, tmp_path / "other", "--scheme"]
    assert "no file" in wrong(*other, "vq-4", "--text", tmp_path / "no.txt", capsys=capsys)
    assert "must be a name or a path" in wrong(*other, "vq-4", "--text", "", capsys=capsys)
    cache = ["calibrate", original, tmp_path / "other", "--kv", "u4"]
    assert "--device is for the weights" in wrong(*cache, "--device", "cuda", capsys=capsys)
    assert "--skip is for the weights" in wrong(*cache, "--skip", "mlp", capsys=capsys)


def test_bits_are_shared_out(original, eval_text, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["calibrate", str(original), str(out), "--text", eval_text, *CALIBRATION]
    small = ["--skip", "mlp", "--candidates", "vq-2", "turboquant-4"]
    assert main([*arguments, "--target-bits", "3.2", *small]) == 0
    assert "vq-2, turboquant-4 for 3.2 bits: 3." in capsys.readouterr().out
    assert main(["info", str(out), "--json", "-"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert 2.2 < info["bits_per_weight"] <= 3.2 and len(set(info["layers"].values())) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    other = ["calibrate", original, tmp_path / "other", "--target-bits"]
    assert "target_bits must be at least 2.125" in wrong(*other, "1", capsys=capsys)


def test_explain_names_the_kernel(quantized, capsys):
    assert main(["explain", str(quantized)]) == 0
    out = capsys.readouterr().out
    kernel = "reference" if library.load() is None else "cpu.linear"
    assert f"{kernel} runs model.layers.0" in out and "attention" not in out
    assert main(["explain", str(quantized), "--kv", "u4"]) == 0
    out = capsys.readouterr().out
    assert "attention" in out and "append" in out and "cache.layers.0 and" in out


def wrong(*arguments, capsys) -> str:
    """The one line that a wrong command prints."""
    assert main([str(a) for a in arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("hf-vq: error: ") and "Traceback" not in "".join(lines)
    return lines[-1]


def test_errors_are_one_line(quantized, original, eval_text, tmp_path, capsys):
    out = tmp_path / "out"
    text = ["--text", eval_text, "--tokens", "256", "--context", "128"]
    assert "vq-4" in wrong("quantize", original, out, "--scheme", "vq-44", capsys=capsys)
    assert "exists" in wrong("quantize", original, quantized, capsys=capsys)
    assert "already" in wrong("quantize", quantized, out, capsys=capsys)
    assert "config.json" in wrong("quantize", tmp_path / "nothing", out, capsys=capsys)
    assert "matches no" in wrong("quantize", original, out, "--skip", "nose", capsys=capsys)
    assert not out.exists() and not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    assert "config.json" in wrong("info", "", capsys=capsys)
    assert "cannot read" in wrong("eval", original, "--text", tmp_path / "no.txt", capsys=capsys)
    assert "hardly a code" in wrong("eval", original, *text, "--cache", "u4", capsys=capsys)
    assert "KV" in wrong("eval", original, *text, "--cache", "u9", capsys=capsys)
    # MODEL may come last: it is no scheme of the cache then.
    assert "hardly a code" in wrong("eval", *text, "--cache", "u4", original, capsys=capsys)
    last = ["--compare", "u4", "--cache", "u3", original]
    assert "Or one of the peers" in wrong("eval", *text, *last, capsys=capsys)
    for names in (["--cache", "u4"], ["--compare", "vq-4", "nf4", "--cache", "u4", original]):
        assert "eval needs MODEL: put it" in wrong("eval", *text, *names, capsys=capsys)
    longer = ["--text", eval_text, "--tokens", "320", "--context", "160"]
    missing = wrong("eval", original, *longer, "--cache", "cq-4", capsys=capsys)
    assert "calibrate --kv cq-4" in missing
    assert "already" in wrong("demo", "--model", quantized, "--text", eval_text, capsys=capsys)
    assert "unknown" in wrong("demo", "--scheme", "no", capsys=capsys)
    nowhere = tmp_path / "none" / "x.json"
    assert "cannot write" in wrong("info", original, "--json", nowhere, capsys=capsys)


def test_a_damaged_file_is_an_error(quantized, tmp_path, capsys):
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in quantized.iterdir():
        if path.is_file():
            (broken / path.name).write_bytes(path.read_bytes())
    whole = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "model.safetensors" in wrong("info", broken, capsys=capsys)
    config = json.loads((broken / "config.json").read_text())
    del config["quantization_config"]["scheme"]["vector_size"]
    (broken / "config.json").write_text(json.dumps(config))
    assert "vector_size" in wrong("info", broken, capsys=capsys)


def test_usage(capsys):
    for arguments in (
        [],
        ["nothing"],
        ["eval", "m", "--tokens", "-3"],
        ["eval", "m", "--tokens", "x"],
        ["calibrate", "m"],
        ["calibrate", "m", "out", "--kv", "u4", "--scheme", "vq-4"],
        ["calibrate", "m", "--kv", "u4", "--tokens", "0"],
    ):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
    verbs = ("quantize", "calibrate", "eval", "info", "explain", "demo")
    assert all(verb in build_parser().format_help() for verb in verbs)


def test_debug_shows_the_traceback(tmp_path):
    with pytest.raises(ValueError):
        main(["info", str(tmp_path), "--debug"])


def test_a_model_that_does_not_suit(original, tmp_path, capsys):
    """An encoder-decoder, and a model with another tokenizer than the built-in text's."""
    T5Config(d_model=16).save_pretrained(tmp_path)
    assert "cannot load" in wrong("explain", tmp_path, capsys=capsys)
    for name in ("config.json", "model.safetensors", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((original / name).read_bytes())
    tokenizer = json.loads((original / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 8191, "content": "§§"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    assert "give --text" in wrong("eval", tmp_path, capsys=capsys)


def test_the_demo(original, eval_text, tmp_path, monkeypatch, capfd):
    """With short contexts, on a small model (CI runs `make demo`); only the record is on stdout."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "CONTEXT", 160)
    monkeypatch.setattr(demo, "PROMPT", 144)
    monkeypatch.setattr(demo, "NEW_TOKENS", 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # in the new process
    arguments = ["--model", str(original), "--scheme", "turboquant-4", "--text", eval_text]
    arguments += ["--tokens", "320", "--revision", "abc"]
    assert main(["demo", *arguments, "--json", "-"]) == 0
    out, shown = capfd.readouterr()
    record = json.loads(out)
    options = "--model MODEL --scheme turboquant-4 --text TEXT --tokens 320"
    assert record["command"] == f"hf-vq demo {options}"
    assert record["revision"] == "abc"
    rows = record["results"]["rows"]
    assert [(row["weights"], row["cache"]) for row in rows] == [
        ("original", "model's dtype"),
        ("turboquant-4", "model's dtype"),
        ("turboquant-4", "VQCache"),
    ]
    assert all(cell in shown for cells in demo.cells(rows)[1] for cell in cells)
    assert rows[1]["bits_per_weight"] < 4.5 < rows[0]["bits_per_weight"]
    assert rows[2]["kv_bytes"] < rows[1]["kv_bytes"]
    assert 0 == rows[0]["kld"] < rows[1]["kld"] != rows[2]["kld"]
    assert all(row["tokens_per_second"] > 0 for row in rows)
    assert not list(tmp_path.iterdir())


def test_the_demo_compares_logits(original):
    """Bit for bit: the smallest change of a weight shows."""
    model = AutoModelForCausalLM.from_pretrained(original)
    before = demo.logits_digest(model, [5, 6, 7])
    assert demo.logits_digest(model, [5, 6, 7]) == before
    model.model.norm.weight.data[3] *= 1 + 2**-20
    assert demo.logits_digest(model, [5, 6, 7]) != before
