"""VPTQ: vectors along the output dimension, outliers, an order of columns; kept as published."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hf_vq
from hf_vq.cli import main
from hf_vq.errors import VQConfigError, VQFormatError
from hf_vq.formats.published import VptqLayout
from hf_vq.nn.published import PublishedLinear
from hf_vq.nn.replace import vq_modules
from tests.fixtures.published_models import dense_twin, make_vptq, vptq_layer
from tests.fixtures.tiny_models import tokens

LOAD = AutoModelForCausalLM.from_pretrained
Q = "model.layers.0.self_attn.q_proj"
VARIANTS = {
    "v8-k256": ("llama", {}),
    "v8-k256-16, bias": ("qwen3", {"residual": 16, "dtype": torch.bfloat16}),
    "v6-k4096": ("llama", {"vector": 6, "count": 4096, "norm": False}),
    "outliers": ("llama-tied", {"outliers": 4, "residual": 32}),
    "groups, shared": ("llama", {"groups": 2, "shared": True, "shards": 2}),
    "experts": ("mixtral", {"count": 16, "perm": False}),
    "float32": ("llama", {"dtype": torch.float32, "outliers": 2}),
}


@pytest.fixture(autouse=True)
def adopted():
    hf_vq.adopt("vptq")
    yield
    hf_vq.release()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.usefixtures("reference_kernels")
def test_round_trip(tmp_path, variant):
    name, options = VARIANTS[variant]
    dense = make_vptq(tmp_path / "in", name, **options)
    twin = dense_twin(tmp_path / "dense", name, dense)
    model = LOAD(tmp_path / "in")
    coded = vq_modules(model)
    assert "lm_head" not in coded and len(coded) >= 14
    for layer, module in coded.items():
        assert isinstance(module, PublishedLinear)
        own = layer.replace("mlp.experts", "block_sparse_moe.experts")
        assert torch.equal(module.decoded(), dense[f"{own}.weight"]), layer
    with torch.no_grad():
        logits, exact = model(tokens()).logits, twin(tokens()).logits
    assert torch.equal(logits, exact) or (
        name == "mixtral" and (logits - exact).abs().max() <= 1e-5 * exact.abs().max()
    )
    assert model.generate(tokens(), max_new_tokens=3, do_sample=False).shape == (2, 12)
    model.save_pretrained(tmp_path / "saved")
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "converted")]) == 0
    for folder in ("saved", "converted"):
        again = LOAD(tmp_path / folder)
        assert again.config.quantization_config.quant_method == "hf_vq"
        with torch.no_grad():
            assert torch.equal(again(tokens()).logits, logits)
        assert main(["info", str(tmp_path / folder)]) == 0


@pytest.mark.parametrize("count", [2, 100, 256, 65536])
@pytest.mark.parametrize("residual", [0, 2, 300, 65536])
@pytest.mark.parametrize(("out", "size", "vector"), [(1, 3, 8), (17, 21, 4), (24, 33, 12)])
def test_odd_sizes(count, residual, out, size, vector):
    """Codes of 1 to 32 bits, rows that are no multiple of a vector, words that are not full."""
    tensors, weight, about = vptq_layer(
        out, size, vector=vector, count=count, residual=residual, outliers=size % 2
    )
    layout = VptqLayout.of({"config_for_layers": {"X": about}}, "X", tensors)
    layout.check(tensors, (out, size), "X")
    for suffix, tensor in tensors.items():
        layout.inspect(suffix, tensor, suffix)
    assert torch.equal(layout.decode(tensors, out, size), weight)


def edit(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file)


def put(key, value):
    return lambda tensors: tensors[f"{Q}.{key}"].view(-1)[:1].fill_(value)


DAMAGES = {
    "indices": (lambda t: t.pop(f"{Q}.indices"), rf"lacks {Q}\.indices"),
    "centroids": (lambda t: t.pop(f"{Q}.centroids.weight"), rf"lacks {Q}\.centroids\.weight"),
    "perm": (lambda t: t.pop(f"{Q}.perm"), rf"lacks {Q}\.perm"),
    "outliers": (put("outlier_indices", 300), rf"{Q}\.outlier_indices holds code 300.*of 300"),
    "order": (put("perm", 64), rf"{Q}\.perm is no order of 64 columns"),
    "outside": (put("indices", -1), rf"{Q}\.indices holds code 127.*of 100 entries"),
    "nan": (put("weight_scale", float("nan")), rf"{Q}\.weight_scale holds NaN"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(tmp_path, damage):
    make_vptq(tmp_path / "in", count=100, outliers=4)
    change, match = DAMAGES[damage]
    edit(tmp_path / "in", change)
    with pytest.raises(VQFormatError, match=match):
        LOAD(tmp_path / "in")


def test_a_layer_that_config_json_does_not_describe():
    tensors, _, about = vptq_layer(8, 8)
    for config in ({}, {"config_for_layers": {"Y": about}}):
        with pytest.raises(VQConfigError, match="config_for_layers says nothing of X"):
            VptqLayout.of(config, "X", tensors)
    for change in ({"is_indice_packed": False}, {"vector_lens": [8]}, {"group_num": "1"}):
        with pytest.raises(VQConfigError, match=next(iter(change))):
            VptqLayout.of({"config_for_layers": {"X": {**about, **change}}}, "X", tensors)


def test_requantize(tmp_path):
    dense = make_vptq(tmp_path / "in", residual=16)
    assert (
        main(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--requantize", "vq-4"]) == 0
    )
    for name, module in vq_modules(LOAD(tmp_path / "out")).items():
        exact = dense[f"{name}.weight"]
        assert (module.decoded() - exact).square().sum() < 0.02 * exact.square().sum()


@pytest.mark.parametrize("variant", ["groups, shared", "experts"])
def test_a_converted_layout_is_what_was_written(tmp_path, variant, capsys):
    """The layouts of layers are part of their digests, whatever the layers' names in the file."""
    name, options = VARIANTS[variant]
    make_vptq(tmp_path / "in", name, **options)
    out = tmp_path / "out"
    assert main(["convert", str(tmp_path / "in"), str(out)]) == 0
    capsys.readouterr()
    assert main(["verify", str(out)]) == 0
    assert "all as saved" in capsys.readouterr().out
    config = json.loads((out / "config.json").read_text())
    layer, layout = list(config["quantization_config"]["layouts"].items())[-1]
    layout["dtype"] = "float32" if layout["dtype"] == "float16" else "float16"
    (out / "config.json").write_text(json.dumps(config))
    assert main(["verify", str(out)]) == 1
    assert f"{layer.rpartition('.')[2]}.weight is not what was saved" in capsys.readouterr().out
