"""`hf-vq export`: what other programs read of a file is what the model holds afterwards."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import hf_vq
from hf_vq import VQConfig, VQConfigError, VQFormatError
from hf_vq.calibration.hessians import by_block
from hf_vq.cli import main
from hf_vq.evaluation.recoding import Recoding
from hf_vq.interop.export import TYPES
from hf_vq.interop.export.gguf_file import write_gguf
from hf_vq.interop.export.gptq import encode, write_gptq
from hf_vq.nn.replace import vq_modules

gguf = pytest.importorskip("gguf")
SIZES = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=8192,
    bos_token_id=0,
    eos_token_id=0,
)
LLAMA3 = dict(
    rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip
KINDS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama-bias": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"hidden_size": 128}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 128}),  # as Transformers' reader takes it
}


def tiny(kind="llama", **options):
    """A random model, whose vectors are not all 0 or 1."""
    make, config, given = KINDS[kind]
    model = make(config(**{**SIZES, **given, **options})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) / 8)
    return model


@pytest.fixture(scope="module")
def tokenizer(tinybooks):
    return AutoTokenizer.from_pretrained(tinybooks)


@pytest.fixture(scope="module")
def coded(tmp_path_factory, tokenizer) -> Path:
    """A folder of codes."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("export") / "coded"
    model = hf_vq.quantize_model(tiny(hidden_size=128), VQConfig(activations=None))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def read(path: Path):
    """What Transformers reads of a GGUF file."""
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()


def assert_same_weights(one, other):
    first, second = one.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_gguf_is_read_as_the_model(kind, tokenizer, tmp_path):
    model = tiny(kind)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    write_gguf(model, tokenizer, tmp_path / "m.gguf", "f32")
    again = read(tmp_path / "m.gguf")
    assert type(again) is (LlamaForCausalLM if kind == "mistral" else type(model))  # one in GGUF
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    for name, tensor in model.named_parameters():  # Transformers' reader drops biases of Llama
        if kind != "llama-bias" or not name.endswith("bias"):
            assert torch.equal(tensor, again.get_parameter(name)), name
    for key in ("max_position_embeddings", "rms_norm_eps", "num_key_value_heads", "vocab_size"):
        assert getattr(again.config, key) == pytest.approx(getattr(model.config, key)), key
    assert not [path for path in tmp_path.iterdir() if path.name != "m.gguf"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", TYPES)
def test_the_model_holds_what_a_reader_decodes(kind, tokenizer, tmp_path):
    model = tiny(hidden_size=128)
    before = model.state_dict()["model.layers.0.self_attn.q_proj.weight"].clone()
    write_gguf(model, tokenizer, tmp_path / "m.gguf", kind)
    assert_same_weights(model, read(tmp_path / "m.gguf"))
    after = model.state_dict()["model.layers.0.self_attn.q_proj.weight"]
    error = ((after - before).norm() / before.norm()).item()
    assert error <= {"f32": 0, "f16": 1e-3, "bf16": 5e-3, "q8_0": 0.01}.get(kind, 0.2)
    stored = {
        tensor.name: tensor.tensor_type.name
        for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors
    }
    assert stored["blk.0.ffn_down.weight"] == kind.upper()
    assert stored["output_norm.weight"] == "F32"
    below = kind in ("q4_0", "q4_1", "q5_0", "q5_1")
    assert stored["token_embd.weight"] == ("Q8_0" if below else kind.upper())


def test_rows_that_fill_no_block_are_f16(tokenizer, tmp_path):
    model = tiny(intermediate_size=80)
    write_gguf(model, tokenizer, tmp_path / "m.gguf", "q4_0")
    stored = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert stored["blk.0.ffn_down.weight"] == "F16" and stored["blk.0.ffn_up.weight"] == "Q4_0"


def test_frequencies_of_llama3(tokenizer, tmp_path):
    """Factors that llama.cpp divides frequencies by."""
    model = tiny(rope_parameters=LLAMA3)
    write_gguf(model, tokenizer, tmp_path / "m.gguf", "f32")
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    plain = 1 / 10000.0 ** (torch.arange(0, 32, 2) / 32)
    found = plain / torch.from_numpy(stored["rope_freqs.weight"].copy())
    torch.testing.assert_close(found, model.model.rotary_emb.inv_freq)
    assert not torch.allclose(found, plain)


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        ("mistral", {"sliding_window": 16}, "sliding windows"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("qwen2", {"rope_parameters": LLAMA3}, "rope_type='llama3'"),
        ("qwen2", {"hidden_size": 64}, "heads that do not make up hidden_size"),
        ("qwen3", {"attention_bias": True}, "biases of attention"),
    ],
)
def test_what_gguf_is_not_written_for(kind, options, named, tokenizer, tmp_path):
    with pytest.raises(VQConfigError, match=f"{named}.*convert_hf_to_gguf"):
        write_gguf(tiny(kind, **options), tokenizer, tmp_path / "m.gguf")
    assert not list(tmp_path.iterdir())


def test_tokens_that_the_model_does_not_have(tokenizer, tmp_path):
    with pytest.raises(VQConfigError, match="a token 8191, and the model 8000 embeddings"):
        write_gguf(tiny(vocab_size=8000), tokenizer, tmp_path / "m.gguf")
    assert not list(tmp_path.iterdir())


def test_words_that_are_not_merged(tokenizer, tmp_path):
    """llama.cpp knows this of a tokenizer by its name alone."""
    file = json.loads(tokenizer.backend_tokenizer.to_str())
    file["model"]["ignore_merges"] = True
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(file)))
    with pytest.raises(VQConfigError, match="convert_hf_to_gguf"):
        write_gguf(tiny(), other, tmp_path / "m.gguf")


@pytest.mark.parametrize("wrong", [float("nan"), 1e30])
def test_gguf_refuses_what_a_type_does_not_hold(wrong, tokenizer, tmp_path):
    model = tiny()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[2, 5] = wrong
    with pytest.raises(VQFormatError, match=r"ffn_up\.weight holds weights"):
        write_gguf(model, tokenizer, tmp_path / "m.gguf")
    assert not list(tmp_path.iterdir())


def test_other_classes_are_an_error_before_anything_is_measured(tokenizer, tmp_path, capsys):
    config = GPTNeoXConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=64,
    )
    model = hf_vq.quantize_model(GPTNeoXForCausalLM(config), VQConfig(activations=None))
    model.save_pretrained(tmp_path / "coded")
    assert main(["export", str(tmp_path / "coded"), str(tmp_path / "m.gguf"), "--to", "gguf"]) == 2
    shown = capsys.readouterr().err
    assert "not GPTNeoXForCausalLM" in shown and "--to dense" in shown


def test_without_the_package(coded, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert main(["export", str(coded), str(tmp_path / "m.gguf"), "--to", "gguf"]) == 2
    assert "pip install gguf" in capsys.readouterr().err


def sentencepiece() -> PreTrainedTokenizerFast:
    """A tokenizer as those of Llama 2 and Mistral, trained here."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special[:3], show_progress=False)
    text = "the cat sat on the mat and the dog sat on the log, as cats and dogs do. " * 20
    made.pre_tokenizer = pre_tokenizers.Metaspace()  # words, to learn merges from
    made.train_from_iterator([text], trainer)
    file = json.loads(made.to_str())
    vocab = file["model"]["vocab"]
    for token in special[3:]:
        vocab.setdefault(token, len(vocab))
    file["pre_tokenizer"] = None
    made = Tokenizer.from_str(json.dumps(file))
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


TEXTS = (
    "The cat sat on the mat, 1234 times; isn't it?",
    "  two spaces\n\n\tand a tab\r\nCAPITALS'LL do.",
    "caf\u00e9 \u4f60\u597d \U0001f600 end",
)


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_llama_cpp_splits_texts_alike(kind, tokenizer, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    used = tokenizer if kind == "bytes" else sentencepiece()
    size = 8192 if kind == "bytes" else len(used)
    write_gguf(tiny(vocab_size=size), used, tmp_path / "m.gguf")
    model = llama_cpp.Llama(str(tmp_path / "m.gguf"), vocab_only=True, verbose=False)
    for text in TEXTS:
        found = model.tokenize(text.encode(), add_bos=False, special=True)
        assert found == used(text, add_special_tokens=False).input_ids, text


@pytest.mark.parametrize("kind", KINDS)
def test_llama_cpp_generates_the_same_tokens(kind, tokenizer, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    model = tiny(kind)
    write_gguf(model, tokenizer, tmp_path / "m.gguf", "f32")
    prompt = tokenizer("It was a dark and stormy night").input_ids
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0]
    other = llama_cpp.Llama(str(tmp_path / "m.gguf"), logits_all=True, verbose=False, n_threads=1)
    other.eval(prompt)
    found = torch.tensor(other.scores[: len(prompt)].copy())
    # f16 caches and products of llama.cpp, which rounds inputs to 11 bits
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02 * expected.abs().max().item())


def unpacked(tensors: dict[str, torch.Tensor], row: int, column: int) -> float:
    """w[row, column] by the letter of the format."""
    word = tensors["qweight"][column // 8, row].item() % 2**32
    code = word >> 4 * (column % 8) & 15
    group = int(tensors["g_idx"][column])
    word = tensors["qzeros"][group, row // 8].item() % 2**32
    zero = (word >> 4 * (row % 8) & 15) + 1
    return tensors["scales"][group, row].item() * (code - zero)


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_gptq_files_hold_the_model(tmp_path):
    model = tiny(hidden_size=128, intermediate_size=192)
    names = [name for name, _ in model.named_modules() if name.endswith("_proj")]
    before = {name: model.get_submodule(name).weight.clone() for name in names}
    names.remove("model.layers.1.mlp.up_proj")
    assert write_gptq(model, names, tmp_path) == (64, 13)
    tensors = stored_tensors(tmp_path)
    assert torch.equal(
        tensors["model.layers.1.mlp.up_proj.weight"], before["model.layers.1.mlp.up_proj"]
    )
    for name in names:
        weight = model.get_submodule(name).weight
        own = {key: tensors[f"{name}.{key}"] for key in ("qweight", "qzeros", "scales", "g_idx")}
        rows, width = weight.shape
        assert own["qweight"].shape == (width // 8, rows) and own["qweight"].dtype == torch.int32
        assert own["qzeros"].shape == (width // 64, rows // 8)
        assert own["scales"].shape == (width // 64, rows) and own["scales"].dtype == torch.float16
        for row, column in ((0, 0), (1, 7), (8, 65), (rows - 1, width - 1)):
            assert unpacked(own, row, column) == pytest.approx(weight[row, column].item(), abs=1e-6)
        assert 0 < (weight - before[name]).norm() < 0.2 * before[name].norm()
        assert f"{name}.weight" not in tensors
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert written == json.loads((tmp_path / "quantize_config.json").read_text())
    assert (written["bits"], written["group_size"], written["desc_act"]) == (4, 64, False)
    (excepted,) = written["dynamic"]
    assert re.match(excepted.removeprefix("-:"), "model.layers.1.mlp.up_proj")
    assert "quantization_config" not in model.config.to_dict()


def test_gptq_searches_scales():
    weight = torch.randn(16, 256, dtype=torch.float64)
    weight[3, 130:140] = 0
    weight[5, :128] = 0
    tensors = encode(weight, 128)
    found = torch.tensor([[unpacked(tensors, r, c) for c in range(256)] for r in range(16)])
    largest = weight.unflatten(1, (-1, 128)).abs().amax(-1, keepdim=True).clamp_min(1e-9)
    plain = (weight.unflatten(1, (-1, 128)) / largest * 7).round() / 7 * largest
    assert (found - weight).norm() < 0.95 * (plain.flatten(1) - weight).norm()
    assert not found[5, :128].any() and not found[3, 130:140].any()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1e30])
def test_gptq_refuses_what_fp16_does_not_hold(wrong):
    weight = torch.randn(8, 128)
    weight[2, 5] = wrong
    with pytest.raises(VQFormatError, match="proj holds weights"):
        encode(weight, 128, "proj")


def test_gptq_is_not_written_of_fused_experts(quantized, tmp_path, capsys):
    command = ["export", str(quantized("qwen3-moe")), str(tmp_path / "out"), "--to", "gptq"]
    assert main(command) == 2
    assert "fused experts" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_adapter_is_merged_first(coded, tmp_path, capsys):
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(coded)
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj"], r=2))
    shutil.copytree(coded, tmp_path / "both")
    model.save_pretrained(tmp_path / "both")
    assert main(["export", str(tmp_path / "both"), str(tmp_path / "out")]) == 2
    assert "merge it" in capsys.readouterr().err


def test_gptq_without_layers_that_fit(tmp_path):
    model = tiny()
    with pytest.raises(VQConfigError, match="--to dense"):
        write_gptq(model, ["model.layers.0.mlp.down_proj"], tmp_path, 128)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("to", ["dense", "gguf", "gptq"])
def test_what_export_costs_is_printed(to, coded, tokenizer, tmp_path, capsys, tinybooks):
    out = tmp_path / ("m.gguf" if to == "gguf" else "out")
    text = tmp_path / "text.txt"
    text.write_text("It was a dark and stormy night, and the cat sat on the mat. " * 100)
    options = ["--type", "q4_0"] if to == "gguf" else []
    command = ["export", str(coded), str(out), "--to", to, "--text", str(text), *options]
    assert main(command) == 0
    shown = capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(coded)
    recoding = Recoding(model, tokenizer, str(text))
    hf_vq.dequantize(model)
    if to == "gptq":
        tensors = stored_tensors(out)
        config = json.loads((out / "config.json").read_text())["quantization_config"]
        assert config["group_size"] == 32
        state = model.state_dict()
        for name in {name.rpartition(".")[0] for name in tensors if name.endswith("qweight")}:
            own = {
                key: tensors[f"{name}.{key}"] for key in ("qweight", "qzeros", "scales", "g_idx")
            }
            rows, width = state[f"{name}.weight"].shape
            dense = [[unpacked(own, row, column) for column in range(width)] for row in range(rows)]
            state[f"{name}.weight"].copy_(torch.tensor(dense))
    else:
        other = read(out) if to == "gguf" else AutoModelForCausalLM.from_pretrained(out)
        model.load_state_dict(other.state_dict())
    found = recoding.cost()
    assert float(re.search(r"codes (\S+)", shown)[1]) == pytest.approx(
        found.kld, rel=0.01, abs=1e-9
    )
    assert (found.kld > 1e-6) == (to != "dense")
    assert main([*command, "--force", "--no-kld"]) == 0
    assert "divergence" not in capsys.readouterr().out
    assert main(command) == 2  # OUT exists


def test_the_packaged_text_is_taken(coded, tmp_path, capsys):
    assert main(["export", str(coded), str(tmp_path / "out")]) == 0
    assert "tokens of the packaged text" in capsys.readouterr().out


def test_options_of_other_formats_are_errors(coded, tmp_path, capsys):
    command = ["export", str(coded), str(tmp_path / "out")]
    assert main([*command, "--type", "q8_0"]) == 2
    assert main([*command, "--to", "gguf", "--calibration", "none"]) == 2
    assert main([*command[:2], str(tmp_path), "--to", "gguf"]) == 2
    assert "one file" in capsys.readouterr().err


def test_an_unchanged_model_costs_nothing(coded, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(coded)
    assert vq_modules(model)
    recoding = Recoding(model, tokenizer)
    found = recoding.cost()
    assert abs(found.kld) < 1e-6 and found.top1 == 100


def test_errors_are_fed_back(coded, tmp_path, capsys):
    """What a text says of the inputs lowers the divergence of the same bits."""
    found = []
    for options in ([], ["--calibration", "default"]):
        out = tmp_path / f"out{len(options)}"
        assert main(["export", str(coded), str(out), "--to", "gptq", *options]) == 0
        found.append(float(re.search(r"codes (\S+)", capsys.readouterr().out)[1]))
    assert found[1] < found[0]


def test_hessians_are_of_each_block_as_it_became(tokenizer):
    """Those of a later block see what became of the blocks before it."""
    model = tiny()
    ids = torch.arange(64).reshape(2, 32)
    names = [f"model.layers.{index}.mlp.down_proj" for index in range(2)]
    inputs: list[torch.Tensor] = []
    walk = by_block(model, names, ids)
    next(walk)
    with torch.no_grad():
        model.get_submodule(names[0]).weight.mul_(3)
    (found,) = next(walk).values()
    hook = model.get_submodule(names[1]).register_forward_pre_hook(lambda _, a: inputs.append(a[0]))
    with torch.no_grad():
        model(ids)
    hook.remove()
    rows = inputs[0].flatten(0, 1)
    torch.testing.assert_close(found, rows.T @ rows / len(rows))
