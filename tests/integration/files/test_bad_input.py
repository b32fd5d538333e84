"""Broken checkpoints and unsuitable models: one VQ...Error that says what, where and what to do."""

import json
import shutil
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from hf_vq.errors import VQConfigError, VQError, VQFormatError, VQSchemeError
from hf_vq.formats import VQScheme
from hf_vq.hf import VQConfig
from hf_vq.hf.config import FORMAT_VERSION
from hf_vq.nn import VQLinear

LOAD = AutoModelForCausalLM.from_pretrained
LAYER = "layers.1.mlp.down_proj"  # as AutoModel names it
NAME = f"model.{LAYER}"  # as the file does
CODEBOOK = "vq_codebook.gauss_2x8"


@pytest.fixture
def broken(quantized, tmp_path):
    """Change a copy of a checkpoint: `broken(change)`, or `broken(change, "config.json")`."""

    def make(change, name="model.safetensors", model="llama", scheme="vq-4"):
        folder = tmp_path / "broken"
        shutil.copytree(quantized(model, scheme), folder)
        file = folder / name
        if name.endswith(".json"):
            data = json.loads(file.read_text())
            change(data["quantization_config"])
            file.write_text(json.dumps(data))
        else:
            data = load_file(file)
            change(data)
            save_file(data, file, metadata={"format": "pt"})
        return folder

    return make


def put(name, value):
    def change(data):
        data[name] = value(data[name])

    return change


def nan_at_the_end(tensor):
    tensor = tensor.clone()
    tensor.view(-1)[-1] = float("nan")
    return tensor


CHANGES = {
    "no codes": (lambda d: d.pop(f"{NAME}.weight"), f"lacks .*{LAYER}.weight.*random"),
    "no scales": (lambda d: d.pop(f"{NAME}.vq_scale"), f"lacks .*{LAYER}.vq_scale.*random"),
    "no signs": (lambda d: d.pop(f"{NAME}.vq_signs"), f"lacks .*{LAYER}.vq_signs.*random"),
    "no codebook": (lambda d: d.pop(CODEBOOK), f"lacks {CODEBOOK}"),
    "no layer": (
        lambda d: [d.pop(key) for key in list(d) if key.startswith(NAME)],
        f"lacks .*{LAYER}",
    ),
    "cut codes": (put(f"{NAME}.weight", lambda t: t[:, :-1].clone()), f"{LAYER}.weight is torch"),
    "fewer rows": (put(f"{NAME}.vq_scale", lambda t: t[1:].clone()), f"{LAYER}.vq_scale is torch"),
    "other dtype": (
        put(f"{NAME}.vq_scale", lambda t: t.float()),
        f"{LAYER}.vq_scale is torch.float32",
    ),
    "dense weights": (
        put(f"{NAME}.weight", lambda t: t.half()),
        f"{LAYER}.weight is torch.float16",
    ),
    "scale nan": (put(f"{NAME}.vq_scale", nan_at_the_end), f"{LAYER}.vq_scale holds NaN"),
    "codebook nan": (put(CODEBOOK, nan_at_the_end), f"{CODEBOOK} holds NaN"),
    "codebook shape": (put(CODEBOOK, lambda t: t[:, :-1].clone()), f"{CODEBOOK} is torch"),
    "codebook values": (put(CODEBOOK, lambda t: t * 2), "config.json records"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_is_missing_or_wrong(broken, change):
    folder = broken(CHANGES[change][0])
    for load in (LOAD, AutoModel.from_pretrained):
        with pytest.raises(VQFormatError, match=f"{folder}.*{CHANGES[change][1]}") as caught:
            load(folder)
        assert "again" in str(caught.value)  # says what to do


def test_an_experts_tensor_is_missing(broken):
    name = "model.layers.0.mlp.experts.vq_down_proj_codes"
    folder = broken(lambda d: d.pop(name), model="qwen3-moe")
    with pytest.raises(VQFormatError, match=f"lacks {name}"):
        LOAD(folder)


DENSE = ["model.embed_tokens.weight", "model.norm.weight", "model.layers.1.input_layernorm.weight"]


@pytest.mark.parametrize("name", [*DENSE, "lm_head.weight"])
def test_a_dense_tensor_is_missing(broken, name, monkeypatch):
    """Transformers fills it with random numbers and a warning."""
    monkeypatch.setenv("HF_VQ_VERIFY", "0")  # as a file without digests
    folder = broken(lambda d: d.pop(name))
    short = name.removeprefix("model.")
    with pytest.raises(VQFormatError, match=f"{folder}.*lacks {name}.*random"):
        LOAD(folder)
    classify = AutoModelForSequenceClassification.from_pretrained
    for load, its in ((AutoModel.from_pretrained, short), (classify, name)):
        if name == "lm_head.weight":  # these have none
            load(folder)
        else:
            with pytest.raises(VQFormatError, match=f"{folder}.*lacks {its}.*random"):
                load(folder)


def test_dense_tensors_that_may_be_missing(broken, quantized, tmp_path, monkeypatch):
    """Tied to another one, of another size on purpose, or of a head that the file never had."""
    monkeypatch.setenv("HF_VQ_VERIFY", "0")  # as files without digests
    tied = LOAD(quantized("llama-tied"))
    tied.save_pretrained(tmp_path / "tied")
    for keeps in ("model.embed_tokens.weight", "lm_head.weight"):
        folder, file = tmp_path / keeps, tmp_path / keeps / "model.safetensors"
        shutil.copytree(tmp_path / "tied", folder)
        data = load_file(file)
        data[keeps] = data.pop("model.embed_tokens.weight")
        save_file(data, file, metadata={"format": "pt"})
        assert torch.equal(LOAD(folder).lm_head.weight, tied.lm_head.weight)
    data.pop("lm_head.weight")
    save_file(data, file, metadata={"format": "pt"})
    with pytest.raises(VQFormatError, match=r"lacks lm_head.weight.*random"):
        LOAD(folder)
    AutoModel.from_pretrained(quantized()).save_pretrained(tmp_path / "base")
    assert LOAD(tmp_path / "base").lm_head.weight.isfinite().all()
    folder = broken(put("lm_head.weight", lambda t: t[:-1].clone()))
    assert LOAD(folder, ignore_mismatched_sizes=True).lm_head.weight.isfinite().all()


def test_a_learned_codebook_with_nan(broken):
    name = f"{NAME}.vq_codebook"
    folder = broken(put(name, nan_at_the_end), scheme="vq2x6r1-tensor-g64-none")
    with pytest.raises(VQFormatError, match=f"{name}.*NaN"):
        LOAD(folder)


def test_a_learned_codebook_with_integers_of_8_bits(broken):
    name = f"{NAME}.vq_codebook"
    folder = broken(put(name, lambda t: t + 64), scheme="vq4x6r2-tensor-int7-g0-none")
    with pytest.raises(VQFormatError, match=f"{name} holds integers beyond 63"):
        LOAD(folder)


@pytest.mark.parametrize("size", [0, 5, 1000, -1])
def test_a_truncated_file(quantized, tmp_path, size):
    folder = tmp_path / "cut"
    shutil.copytree(quantized(), folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(VQFormatError, match=r"model\.safetensors is truncated or corrupted"):
        LOAD(folder)


def test_a_missing_shard(quantized, tmp_path):
    LOAD(quantized()).save_pretrained(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("model-*"))[1]
    shard.unlink()
    with pytest.raises(VQFormatError, match=shard.name):
        LOAD(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (put("format_version", lambda v: FORMAT_VERSION + 1), "pip install -U"),
        (put("format_version", str), "must be an integer"),
        (put("seed", lambda v: "0"), "seed must be an integer"),
        (put("scheme", lambda v: {**v, "entry_bits": "8"}), "entry_bits must be an integer"),
        (put("scheme", lambda v: {**v, "entry_bits": 10**20}), "entry_bits must be an integer"),
        (put("scheme", lambda v: {**v, "codebook": "unknown"}), "codebook must be one of"),
        (put("scheme", lambda v: "vq-9"), "Known"),
        (lambda d: d.update(group_size=32), "'group_size'"),
        (put("scheme", lambda v: {**v, "entry_bits": 6}), "does not fit its config.json"),
        (put("scheme", lambda v: {**v, "rotation": "none"}), r"holds .*vq_signs.* no use for"),
        (put("scheme", lambda v: {**v, "rotation": "hadamard"}), r"holds .*vq_signs"),
        (put("modules_to_not_convert", lambda v: [*v, NAME]), rf"holds .*{LAYER}\.vq_"),
    ],
)
def test_config_json(broken, change, says):
    folder = broken(change, "config.json")
    for load in (LOAD, AutoModel.from_pretrained):
        with pytest.raises((VQConfigError, VQSchemeError, VQFormatError), match=says):
            load(folder)


def test_more_layers_than_can_be_made(quantized, tmp_path):
    shutil.copytree(quantized("llama", "vq-4"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1 << 31}))
    with pytest.raises(VQFormatError, match="num_hidden_layers is 2147483648"):
        LOAD(tmp_path)


def test_a_layer_outside_the_base_model_is_not_taken_for_a_new_head(tmp_path):
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16}
    config = BertConfig(hidden_size=32, intermediate_size=32, vocab_size=50, **sizes)
    BertForMaskedLM(config).save_pretrained(tmp_path / "dense")
    load, folder = BertForMaskedLM.from_pretrained, tmp_path / "vq"
    model = load(tmp_path / "dense", quantization_config=VQConfig())
    model.save_pretrained(folder)
    assert "AutoModelForMaskedLM.from_pretrained" in (folder / "README.md").read_text()
    name, file = "cls.predictions.transform.dense", folder / "model.safetensors"
    assert isinstance(load(folder).get_submodule(name), VQLinear)
    data = {key: tensor for key, tensor in load_file(file).items() if not key.startswith(name)}
    save_file(data, file, metadata={"format": "pt"})
    with pytest.raises(VQFormatError, match=f"lacks {name}"):
        load(folder)


def test_dimensions_that_cannot_be_packed(tmp_path):
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(hidden_size=60, intermediate_size=60, vocab_size=50, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(VQSchemeError, match=r"layers\.0.*60.*modules_to_not_convert"):
        LOAD(tmp_path, quantization_config=VQConfig())


def test_skips_that_match_nothing(dense):
    config = VQConfig(modules_to_not_convert=["lm_haed"])
    with pytest.raises(VQConfigError, match=r"'lm_haed' matches no module.*lm_head"):
        LOAD(dense("llama"), quantization_config=config)


@pytest.mark.parametrize(
    ("value", "says"), [(float("nan"), "NaN"), (float("inf"), "infinity"), (1e38, "too large")]
)
def test_dense_weights_that_cannot_be_quantized(dense, tmp_path, value, says):
    shutil.copytree(dense("llama"), tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    data = load_file(file)
    data[f"{NAME}.weight"][3, 5] = value
    save_file(data, file, metadata={"format": "pt"})
    with pytest.raises(VQFormatError, match=f"{LAYER}.*{says}"):
        LOAD(tmp_path / "m", quantization_config=VQConfig())


def test_a_dense_checkpoint_without_a_weight(dense, tmp_path):
    shutil.copytree(dense("llama"), tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    data = load_file(file)
    del data[f"{NAME}.weight"]
    save_file(data, file, metadata={"format": "pt"})
    with pytest.raises(VQFormatError, match=f"lacks .*{LAYER}.*modules_to_not_convert"):
        LOAD(tmp_path / "m", quantization_config=VQConfig())


def test_a_dense_weight_of_another_shape(dense, tmp_path):
    shutil.copytree(dense("llama"), tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    data = load_file(file)
    data[f"{NAME}.weight"] = data[f"{NAME}.weight"][1:].clone()
    save_file(data, file, metadata={"format": "pt"})
    with pytest.raises(VQFormatError, match=f"{LAYER}.weight has shape"):
        LOAD(tmp_path / "m", quantization_config=VQConfig(activations=None))
    with pytest.raises(RuntimeError, match="mismatch"):  # of Transformers: it is loaded dense
        LOAD(tmp_path / "m", quantization_config=VQConfig())


def test_an_integer_input_is_refused(quantized):
    layer = LOAD(quantized()).model.layers[0].mlp.up_proj
    name = r"model\.layers\.0\.mlp\.up_proj"
    with pytest.raises(VQFormatError, match=rf"{name} .*weight\.dtype.*modules_to_.*'{name}'"):
        layer(torch.zeros(1, 64, dtype=torch.uint8))
    with pytest.raises(VQFormatError, match=rf"{name} .*\[1, 63\].*in_features=64"):
        layer(torch.zeros(1, 63))


def test_a_scheme_that_weights_cannot_have(dense):
    scheme = VQScheme(2, 8, codebook="channel_group", scale_group=0, rotation="none")
    with pytest.raises(VQSchemeError, match="KV cache"):
        LOAD(dense("llama"), quantization_config=VQConfig(scheme))


@pytest.mark.filterwarnings("ignore:.*calibration")
def test_without_the_plugin_loading_fails_loudly(quantized, run_python):
    """Codes are stored as `weight`, so that Transformers alone meets a wrong shape and stops."""
    models = [("llama", name) for name in ("vq-4", "vq-2", "turboquant-8", "turboquant-4+4")]
    models += [("gpt2", "turboquant-8"), ("llama", "vq1x4r2-universal-g64-none")]
    folders = [str(quantized(*model)) for model in models]
    code = (
        "from transformers import AutoModelForCausalLM\n"
        f"for folder in {folders!r}:\n"
        "    try:\n"
        "        AutoModelForCausalLM.from_pretrained(folder)\n"
        "        print('loaded', folder)\n"
        "    except RuntimeError as error:\n"
        "        print('stopped', 'ignore_mismatched_sizes' in str(error))\n"
    )
    shown = run_python(code, HF_VQ_AUTOLOAD="0").splitlines()
    assert shown == ["stopped True"] * len(folders)


@pytest.mark.parametrize(
    "entry",
    [["hf_vq"], {"a": 1}, 7, None, "[" * 3000],
    ids=["list", "dict", "number", "null", "nested"],
)
@pytest.mark.parametrize("place", ["quant_method", "quantization_config"])
def test_a_config_that_transformers_reads_first(entry, place, broken):
    """Transformers looks the method up before hf_vq is asked: an error of either, and no model."""
    folder = broken(lambda config: None, "config.json")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    where = config if place == "quantization_config" else config["quantization_config"]
    where[place] = "ENTRY"
    text = entry if isinstance(entry, str) else json.dumps(entry)
    path.write_text(json.dumps(config).replace('"ENTRY"', text))
    kinds = (VQError, TypeError, AttributeError, ValueError, OSError, RuntimeError)
    with pytest.raises(kinds):
        LOAD(folder)


def test_a_pattern_in_a_file_takes_no_time(quantized, tmp_path):
    """The expression would be matched for minutes."""
    folder = tmp_path / "hostile"
    shutil.copytree(quantized("llama", "turboquant-4+4"), folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["pass2"] = {"([a-z_0-9.]+)+\\!": "offload"}
    path.write_text(json.dumps(config))
    start = time.process_time()
    with pytest.raises(VQConfigError, match="never stored"):
        LOAD(folder)
    assert time.process_time() - start < 10
