"""Calibration of weights: what is heard, in which order, what is kept on disk, what is refused."""

import json
import lzma
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from hf_vq.calibration import layerwise, ldlq_groups
from hf_vq.calibration.blocks import Blocks, find_blocks
from hf_vq.calibration.hessians import Listener
from hf_vq.calibration.text import find_text, sample_text, sequences_of, spread, subfolder
from hf_vq.errors import VQCalibrationError, VQConfigError, VQError
from hf_vq.fit.ldlq import Feedback
from hf_vq.formats.hidden import lock
from hf_vq.hf import VQConfig
from hf_vq.hf.calibration_options import CPU_TOKENS, TOKENS
from tests.fixtures import PROCESSES, ROOT
from tests.fixtures.calibration import CALIBRATION, logits, written
from tests.fixtures.tiny_models import CONFIGS


@pytest.mark.filterwarnings("ignore:vq-2 loses much quality")
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_models_come_closer_and_come_back(name, dense, calibrate, tmp_path):
    original = AutoModelForCausalLM.from_pretrained(dense(name))
    plain = AutoModelForCausalLM.from_pretrained(dense(name), quantization_config=VQConfig("vq-2"))
    model = calibrate(name)
    ids = written(original)
    exact = logits(original, ids)
    errors = [(logits(other, ids) - exact).square().mean() for other in (model, plain)]
    assert errors[0] < 0.8 * errors[1]
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    old, new = model.state_dict(), again.state_dict()
    assert old.keys() == new.keys() == plain.state_dict().keys()
    assert all(torch.equal(old[key], new[key]) for key in old)


def test_what_is_recorded(calibrate, dense, tmp_path):
    config = VQConfig("vq-3", calibration={**CALIBRATION, "resume": str(tmp_path / "work")})
    model = calibrate(config=config)
    assert config.provenance is None and "resume" in config.calibration, "the user's is left alone"
    found = model.config.quantization_config
    assert found.calibration == {"text": "model", "tokens": 256, "context": 32}
    about = found.provenance["calibration"]
    assert about["fallbacks"] == {} and about["output_error"].keys() == set(
        found.provenance["relative_error"]
    )
    assert all(0 < error < 0.03 for error in about["output_error"].values())
    model.save_pretrained(tmp_path / "saved")
    stored = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    del stored["provenance"]["digests"]  # of the files
    assert VQConfig.from_dict(stored).to_dict() == found.to_dict()
    assert str(tmp_path) not in (tmp_path / "saved" / "config.json").read_text()
    card = (tmp_path / "saved" / "README.md").read_text()
    assert "calibrated on | text that the model generates, 256 tokens" in card
    assert "error of a layer's outputs on it" in card


def test_moments_are_those_of_quantized_blocks(calibrate, dense, monkeypatch):
    """Heard in the finished model: before its attention, a block has inputs from codes only."""
    heard = {}

    class Kept(Feedback):
        def __init__(self, moments, *args, where, **options):
            heard[where] = moments.clone()
            super().__init__(moments, *args, where=where, **options)

    monkeypatch.setattr(ldlq_groups, "Feedback", Kept)
    model = calibrate().dequantize()
    sites = ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"]
    assert list(heard) == [f"model.layers.{i}.{site}" for i in (0, 1) for site in sites]
    inputs = []
    layer = model.model.layers[1].self_attn.k_proj
    layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0][0]))
    logits(model, written(AutoModelForCausalLM.from_pretrained(dense("llama"))))
    x = torch.cat([part[: len(part) - len(part) // 8] for part in inputs])  # others are held out
    torch.testing.assert_close(
        heard["model.layers.1.self_attn.q_proj"], x.T @ x / len(x), atol=1e-5, rtol=1e-4
    )


def test_a_listener_tells_inputs_apart():
    layers = {name: nn.Linear(4, 3) for name in ("q", "k", "o", "unused")}
    listener = Listener()
    x, y = torch.randn(2, 5, 4), torch.randn(2, 5, 4)
    for shared, other in zip(x, y, strict=True):
        with listener.listening(layers):
            layers["q"](shared)
            layers["k"](input=shared)
            layers["o"](other)
    with listener.listening(layers):
        layers["unused"](x[:, :0])  # an expert that no token was sent to
    layers["unused"](x)
    assert [site.layers for site in listener.sites] == [["q", "k"], ["o"]]
    for site, inputs in zip(listener.sites, (x, y), strict=True):
        assert site.tokens == [10]
        torch.testing.assert_close(site.hessian(), torch.einsum("bti,btj->ij", inputs, inputs) / 10)


class Killed(BaseException):
    """Stands for SIGKILL: nothing that catches errors sees it."""


def test_killed_at_any_point_it_goes_on(calibrate, tmp_path, monkeypatch):
    """Before and after every file of it, with what a killed writer leaves behind."""
    whole = calibrate()
    replace, folder = os.replace, tmp_path / "work"
    calls = []

    def dying(source, target, before, at):
        calls.append(target)
        if target.name == at and before:
            raise Killed
        replace(source, target)
        if target.name == at:
            raise Killed

    def check(model):
        old, new = whole.state_dict(), model.state_dict()
        assert all(torch.equal(old[key], new[key]) for key in old)
        same = (m.config.quantization_config.to_dict() for m in (whole, model))
        assert next(same) == next(same)
        assert {path.name for path in folder.iterdir()} == {
            "lock", "text.safetensors", "block-0.safetensors", "block-1.safetensors",
        }  # fmt: skip

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda s, t: dying(s, t, False, 0))
        check(calibrate(resume=str(folder)))
    files = [path.name for path in calls]
    assert files == ["text.safetensors", "hidden-1.safetensors", "block-0.safetensors",
                     "block-1.safetensors"]  # fmt: skip
    shutil.rmtree(folder)
    for name in files:  # each run goes on from the one before it
        for before in (True, False):
            with monkeypatch.context() as patch:
                patch.setattr(os, "replace", lambda s, t, b=before, n=name: dying(s, t, b, n))
                with pytest.raises(Killed):
                    calibrate(resume=str(folder))
            left = folder / ".block-0.safetensors.hf_vq-0123"
            left.mkdir()
            (left / "block-0.safetensors").write_bytes(b"half a file")
            left.with_name(f"{left.name}.lock").touch()
    check(calibrate(resume=str(folder)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_random_points_it_goes_on(dense, tmp_path):
    """By a signal, in processes of their own; the file is the same, byte by byte."""
    script = PROCESSES / "killed_calibration.py"
    done = subprocess.run(
        [sys.executable, str(script), str(dense("llama")), str(tmp_path), "5"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 5
    for name in ("model.safetensors", "config.json"):
        files = [(tmp_path / which / name).read_bytes() for which in ("whole", "resumed")]
        assert files[0] == files[1], done.stdout


def test_work_on_something_else_is_not_taken_up(calibrate, tmp_path):
    folder = str(tmp_path / "work")
    calibrate(resume=folder)
    with pytest.raises(VQCalibrationError, match=r"something else \(scheme differ\)\. Delete it"):
        calibrate(scheme="vq-3", resume=folder)
    with pytest.raises(VQCalibrationError, match="tokens, damping differ"):
        calibrate(tokens=128, damping=0.1, resume=folder)
    with pytest.raises(VQCalibrationError, match="layers, weights differ"):
        calibrate("gpt2", resume=folder)
    with (tmp_path / "work" / "lock").open("ab") as held:
        assert lock(held)
        with pytest.raises(VQCalibrationError, match="another process"):
            calibrate(resume=folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(VQCalibrationError, match="cannot write"):
        calibrate(resume=str(tmp_path / "file" / "work"))
    (tmp_path / "work" / "block-1.safetensors").write_bytes(b"damaged")
    with pytest.raises(VQError, match=r"block-1.safetensors cannot be read"):
        calibrate(resume=folder)
    (tmp_path / "work" / "block-1.safetensors").unlink()
    with pytest.raises(VQCalibrationError, match=r"hidden-1.safetensors is missing.*Delete"):
        calibrate(resume=folder)
    (tmp_path / "work" / "text.safetensors").unlink()  # killed while the folder was removed
    again = calibrate(scheme="vq-3", resume=folder).state_dict()
    assert all(
        torch.equal(part, again[key])
        for key, part in calibrate("llama", "vq-3").state_dict().items()
    )


def test_layers_outside_of_blocks_and_those_never_called(dense, monkeypatch):
    """They are quantized without data; the latter is recorded."""
    kind = type(AutoModelForCausalLM.from_pretrained(dense("llama")))
    build = kind.__init__

    def extended(self, config):
        build(self, config)
        self.adapter = nn.Linear(64, 64)
        self.model.layers[1].spare = nn.Linear(64, 64)

    monkeypatch.setattr(kind, "__init__", extended)
    model = kind(AutoModelForCausalLM.from_pretrained(dense("llama")).config)
    state = model.state_dict()
    config = VQConfig("vq-4", calibration=CALIBRATION)
    found = kind.from_pretrained(
        None, config=model.config, state_dict=state, quantization_config=config
    )
    about = found.config.quantization_config.provenance
    assert about["calibration"]["fallbacks"] == {
        "model.layers.1.spare": "was not reached by the text: quantized without calibration"
    }
    assert {"adapter", "model.layers.1.spare"} < set(about["relative_error"])
    assert not {"adapter", "model.layers.1.spare"} & set(about["calibration"]["output_error"])


def test_models_that_cannot_be_calibrated(dense, tmp_path):
    config = VQConfig("vq-4", calibration=CALIBRATION)
    t5 = T5Config(
        d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2, vocab_size=96,
        decoder_start_token_id=0,
    )  # fmt: skip
    T5ForConditionalGeneration(t5).save_pretrained(tmp_path / "t5")
    with pytest.raises(VQCalibrationError, match="no decoder of equal blocks"):
        T5ForConditionalGeneration.from_pretrained(tmp_path / "t5", quantization_config=config)
    model = AutoModelForCausalLM.from_pretrained(dense("llama"))
    assert find_blocks(model, ["model.layers.0.mlp.up_proj", "lm_head"]) == "model.layers"
    ids = torch.arange(64).reshape(2, 32)
    attend = model.model.layers[1].forward
    model.model.layers[1].forward = lambda hidden, **kwargs: attend(hidden, **kwargs)
    assert len(Blocks(model, "model.layers", ids)) == 2
    positions = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: positions(x, position_ids + x.sum())
    with pytest.raises(VQCalibrationError, match="gives block 0 more than hidden states"):
        Blocks(model, "model.layers", ids)
    model.model.rotary_emb.forward = positions
    model.model.layers = nn.ModuleList([*model.model.layers, model.model.layers[0]])
    model.config.num_hidden_layers = 3
    with pytest.raises(VQCalibrationError, match="calls them in the order"):
        Blocks(model, "model.layers", ids)


class Passing(nn.Module):
    """A model that gives a block the second of what the block before it returned."""

    class Block(nn.Module):
        def forward(self, hidden, other=None):
            return hidden + 1, hidden if other is None else other

    def __init__(self, name):
        super().__init__()
        self.embed, self.blocks, self.name = nn.Embedding(8, 4), nn.ModuleList(), name
        self.blocks.extend([self.Block(), self.Block()])
        self.device = torch.device("cpu")

    def forward(self, ids, use_cache):
        hidden, other = self.embed(ids), None
        for block in self.blocks:
            passed = {"other": other} if self.name == "other" else {}
            hidden, other = block(hidden, **passed) if self.name else block(x=hidden)
        return hidden


def test_blocks_that_hand_more_than_hidden_states_to_each_other():
    ids = torch.arange(6).reshape(2, 3)
    with pytest.raises(VQCalibrationError, match="gives block 1 more than hidden states of anoth"):
        Blocks(Passing("other"), "blocks", ids)
    with pytest.raises(VQCalibrationError, match="gives block 0 no hidden states"):
        Blocks(Passing(""), "blocks", ids)
    assert len(Blocks(Passing("nothing"), "blocks", ids)) == 2


def test_inputs_that_are_not_finite(dense, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(dense("llama"))
    model.model.layers[1].input_layernorm.weight.data[3] = torch.nan
    sampled = sample_text(AutoModelForCausalLM.from_pretrained(dense("llama")), 8, 32)
    model.save_pretrained(tmp_path / "model")
    config = VQConfig("vq-4", calibration=CALIBRATION)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layerwise, "sequences_of", lambda *args, **kwargs: sampled)
        with pytest.raises(VQCalibrationError, match=r"layers\.1\.self_attn\.q_proj hold NaN"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=config)
    with pytest.raises(VQCalibrationError, match=r"cannot write a text: its logits hold NaN"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=config)


def test_pieces_of_a_long_text_begin_inside_it():
    """In float32 the last one would begin after the end."""
    assert spread(2**25, 64)[[0, -1]].tolist() == [0, 2**25 - 1]
    assert spread(5, 1).tolist() == [0] and spread(3, 3).tolist() == [0, 1, 2]


def test_sequences_begin_as_the_tokenizer_begins_texts(dense):
    """With the token that the model was trained to see first, and no other."""

    class Letters:
        bos_token_id = 90

        def __init__(self, start):
            self.start = start

        def __call__(self, text, add_special_tokens=True, verbose=True):
            ids = [ord(letter) % 64 for letter in text]
            return SimpleNamespace(input_ids=self.start * add_special_tokens + ids)

    text = "abcdefghijklmnopqrst" * 8
    arguments = (64, 32, 0, False)
    plain = sequences_of(None, text, Letters([]), *arguments)
    begun = sequences_of(None, text, Letters([90]), *arguments)
    other = sequences_of(None, text, Letters([91]), *arguments)
    assert plain.shape == begun.shape == (2, 32) and torch.equal(plain, other)
    assert begun[:, 0].tolist() == [90, 90]
    assert torch.equal(begun[0, 1:], plain[0, :-1]) and torch.equal(begun[1, 1:], plain[1, 1:])


def test_long_texts_are_written_some_sequences_at_a_time(dense, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(dense("llama"))
    sizes, forward = [], model.forward

    def heard(ids, **options):
        sizes.append(len(ids))
        return forward(ids, **options)

    monkeypatch.setattr(model, "forward", heard)
    monkeypatch.setattr("hf_vq.calibration.text._WRITTEN_AT_ONCE", 96)
    ids = sample_text(model, 5, 32, seed=3)
    assert ids.shape == (5, 32) and set(sizes) == {3, 2}
    assert len({tuple(row.tolist()) for row in ids}) == 5, "sequences differ"
    assert torch.equal(ids, sample_text(model, 5, 32, seed=3))


def test_the_tokenizer_is_that_of_the_weights(tmp_path):
    """Its folder, in a directory or in a snapshot of the Hub's cache."""
    assert subfolder(str(tmp_path), [str(tmp_path / "model.safetensors")]) == ""
    assert subfolder(str(tmp_path), [str(tmp_path / "inner" / "model.safetensors")]) == "inner"
    cached = "/cache/models--me--it/snapshots/0123abc"
    assert subfolder("me/it", [f"{cached}/model.safetensors"]) == ""
    assert subfolder("me/it", [f"{cached}/a/b/model.safetensors"]) == "a/b"
    assert subfolder("me/it", []) == ""


def test_revision_and_folder_are_asked_for(dense, calibrate, tmp_path, monkeypatch):
    shutil.copytree(dense("llama"), tmp_path / "model" / "inner")
    (tmp_path / "text.txt").write_text("word " * 300)
    asked = []

    def refuse(source, **options):
        asked.append(options)
        raise OSError("none here")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", refuse)
    config = VQConfig("vq-4", calibration={**CALIBRATION, "text": str(tmp_path / "text.txt")})
    with pytest.raises(VQCalibrationError, match=r"needs the tokenizer of .*: none here"):
        AutoModelForCausalLM.from_pretrained(
            tmp_path / "model", subfolder="inner", quantization_config=config
        )
    assert [options["subfolder"] for options in asked] == ["inner", ""]


def test_memory_that_runs_out_names_the_block(calibrate, tmp_path, monkeypatch):
    """What was done before is kept, and taken up."""
    whole, folder, run = calibrate(), tmp_path / "work", Blocks.run

    def greedy(self, index, *arguments):
        if index == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return run(self, index, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Blocks, "run", greedy)
        with pytest.raises(VQCalibrationError, match=r"ran out while model\.layers\.1 .*shorter"):
            calibrate(resume=str(folder))
    assert (folder / "block-0.safetensors").exists()
    again = calibrate(resume=str(folder)).state_dict()
    assert all(torch.equal(part, again[key]) for key, part in whole.state_dict().items())


def test_texts_that_cannot_be_read_are_refused(dense, calibrate, tmp_path, monkeypatch):
    with pytest.raises(VQCalibrationError, match=r"'no.txt' is no file.*pip install datasets"):
        monkeypatch.setitem(sys.modules, "datasets", None)
        calibrate(text="no.txt")
    file = tmp_path / "some.txt"
    file.write_text("It was the best of times.")
    with pytest.raises(VQCalibrationError, match=r"needs the tokenizer of .*text='model'"):
        calibrate(text=str(file))
    with pytest.raises(VQCalibrationError, match="more than the 64 tokens"):
        calibrate(context=128)
    with pytest.raises(VQCalibrationError, match="there is no device 'nonsense' for calibration"):
        calibrate(device="nonsense")
    asked = []

    def load_dataset(*args, **options):
        asked.append((args, options))
        return [{"text": "one"}, {"text": "two"}, {"text": "three"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    text, facts = find_text("someone/books:english:test", 5)
    assert text == "one\n\ntwo" and facts["text"] == "someone/books:english:test"
    assert asked == [(("someone/books", "english"), {"split": "test", "streaming": True})]
    monkeypatch.setitem(
        sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *a, **k: [{"words": ""}])
    )
    with pytest.raises(VQCalibrationError, match=r"neither a file nor a data set.*KeyError"):
        find_text("someone/books", 5)
    found = find_text(str(file), 5)
    assert found[0] == "It was the best of times." and found[1]["text"] == "some.txt"


@pytest.mark.parametrize(
    ("calibration", "message"),
    [
        (3, "must be a text file"),
        ("", "must be a name or a path"),
        ({}, "calibration\\['text'\\] must be a name"),
        ({"text": "a", "token": 3}, "no option 'token'. Known: text, tokens"),
        ({"text": "a", "tokens": 3}, "tokens'\\] must be an integer in \\[16"),
        ({"text": "a", "context": 3}, "context'\\] must be"),
        ({"text": "a", "damping": 0}, "above 0 and at most 1; got 0"),
        ({"text": "a", "resume": 4}, "resume'\\] must be a name or a path"),
    ],
)
def test_wrong_options_are_refused(calibration, message):
    with pytest.raises(VQConfigError, match=message):
        VQConfig("vq-4", calibration=calibration)


def test_two_bits_with_a_text_are_not_warned_about(recwarn, tmp_path):
    (tmp_path / "text.txt").touch()
    config = VQConfig("vq-2", calibration=tmp_path / "text.txt")
    assert not recwarn.list and config.calibration["text"] == str(tmp_path / "text.txt")


def test_the_shipped_text_is_long_and_mixed_and_named():
    """Enough for the default of a GPU, also where a token has four characters."""
    text, facts = find_text("default", 1)
    assert len(text) > 4 * TOKENS
    assert facts["text"] == "default"
    assert len(lzma.compress(text.encode())) < 400_000


def test_a_cpu_runs_fewer_tokens_unless_told(dense, monkeypatch):
    asked = []

    def sequences(model, text, tokenizer, tokens, *rest, **options):
        asked.append(tokens)
        return sequences_of(model, None, tokenizer, 64, 32, 0, False)

    monkeypatch.setattr(layerwise, "sequences_of", sequences)
    config = VQConfig("vq-3", calibration="model")
    model = AutoModelForCausalLM.from_pretrained(dense("llama"), quantization_config=config)
    assert asked == [CPU_TOKENS]
    assert model.config.quantization_config.calibration["tokens"] == CPU_TOKENS


def test_errors_are_those_of_tokens_that_were_not_seen(dense):
    """The end of each sequence is heard apart, and nothing of it is in H."""
    layer, seen = torch.nn.Linear(8, 4), []
    listener = Listener(hold_out=True)
    for _ in range(3):
        x = torch.randn(1, 16, 8)
        with listener.listening({"layer": layer}):
            layer(x)
        seen.append(x[0])
    (site,) = listener.sites
    first, last = (torch.cat([x[part] for x in seen]) for part in (slice(0, 14), slice(14, 16)))
    torch.testing.assert_close(site.hessian(), first.T @ first / len(first))
    torch.testing.assert_close(site.unseen_hessian(), last.T @ last / len(last))
