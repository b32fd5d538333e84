"""`turboquant-model`: nibbles, norms, rotations drawn from seeds; kept as published."""

import json
import shutil

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hf_vq
from hf_vq.cli import main
from hf_vq.errors import VQConfigError, VQFormatError
from hf_vq.formats.published import TurboquantLayout
from hf_vq.interop.convert import convert
from hf_vq.nn.published import PublishedLinear
from hf_vq.nn.replace import vq_modules
from tests.fixtures.models.published_turboquant import make_turboquant, turboquant_pass
from tests.fixtures.published_models import dense_twin
from tests.fixtures.tiny_models import tokens

LOAD = AutoModelForCausalLM.from_pretrained
Q = "model_layers_0_self_attn_q_proj"
VARIANTS = {
    "4+4": ("llama", {"residual": 4}),
    "4+2, shared, hadamard": (
        "llama", {"residual": 2, "strategy": "shared", "rotation": "hadamard"}
    ),
    "4+1, seeds of layers": ("llama", {"residual": 1, "strategy": "per_layer"}),
    "3, rows, bias": ("qwen3", {"bits": 3, "group": None, "head": False}),
    "tied, norms of 16 bits": ("llama-tied", {"half_norms": True, "rotation": "hadamard"}),
    "int8 embeddings": ("llama", {"embeddings": "int8"}),
    "int4 embeddings, tied": ("llama-tied", {"embeddings": "int4"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "in"
    make_turboquant(folder)
    return folder


@pytest.fixture
def source(made, tmp_path):
    """A checkpoint to damage."""
    return shutil.copytree(made, tmp_path / "in")


def edit(folder, file="model.safetensors", **changes):
    """Put tensors into a file, or take them out (None)."""
    tensors = {**load_file(folder / file), **{k.replace("__", "."): v for k, v in changes.items()}}
    save_file({k: v.contiguous() for k, v in tensors.items() if v is not None}, folder / file)


def tell(folder, **changes):
    path = folder / "turboquant_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.usefixtures("reference_kernels")
def test_round_trip(tmp_path, variant):
    """Converted, loaded, saved, loaded again; weights are those of the writer in float64."""
    name, options = VARIANTS[variant]
    dense = make_turboquant(tmp_path / "in", name, **options)
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    assert not (tmp_path / "out" / "turboquant_config.json").exists()
    model = LOAD(tmp_path / "out")
    coded = vq_modules(model)
    assert len(coded) == 14 + options.get("head", True)
    for layer, module in coded.items():
        assert isinstance(module, PublishedLinear)
        exact = dense[f"{layer}.weight"]
        # A rotated row adds up to 96 numbers of float32; a Q of QR has the error of as many.
        assert (module.decoded() - exact).abs().max() <= 96 * 2**-22 * exact.abs().max(), layer
    embedding = model.get_input_embeddings().weight
    assert torch.equal(embedding, dense["model.embed_tokens.weight"].float())
    twin = dense_twin(tmp_path / "dense", name, {k: v.float() for k, v in dense.items()})
    if "lm_head.weight" in dense:  # where the twin ties it, Transformers leaves it out
        twin.lm_head.weight = torch.nn.Parameter(dense["lm_head.weight"].float())
    with torch.no_grad():
        logits, exact = model(tokens()).logits, twin(tokens()).logits
    assert (logits - exact).abs().max() <= 1e-4 * exact.abs().max()
    model.save_pretrained(tmp_path / "again")
    with torch.no_grad():
        assert torch.equal(LOAD(tmp_path / "again")(tokens()).logits, logits)
    assert main(["info", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("bits", [3, 4])
def test_layers(bits, hadamard):
    """Groups of 128, as that project's default has them."""
    weight = numpy.random.randn(5, 256)
    packed, norms, table, exact = turboquant_pass(weight, bits, 128, 7, hadamard)
    tensors = {"indices": packed, "norms": norms, "codebook": table}
    tensors = {key: torch.from_numpy(value) for key, value in tensors.items()}
    layout = TurboquantLayout(bits, 0, 128, hadamard, 7, 0)
    layout.check(tensors, (5, 256), "X")
    found = layout.decode(tensors, 5, 256)
    assert (found - torch.from_numpy(exact)).abs().max() <= 128 * 2**-22 * numpy.abs(exact).max()


def test_requantized(source, tmp_path):
    found = convert(str(source), str(tmp_path / "out"), requantize=hf_vq.VQConfig("vq-4"))
    assert found["layers"] == 15 and LOAD(tmp_path / "out")(tokens()).logits.isfinite().all()


UNKNOWN = {
    "rotation": ({"rotation": "butterfly"}, "rotation 'butterfly' is not known"),
    "strategy": ({"rotation_strategy": "random"}, "rotation_strategy 'random' is not known"),
    "bits": ({"bit_width": 2}, r"bit_width must be an integer in \[3, 4\]"),
    "residual": ({"residual_bit_width": 5}, r"residual_bit_width must be an integer in \[1, 4\]"),
    "field": ({"per_layer_group_size": {"x": 64}}, "does not know: per_layer_group_size"),
    "group": ({"group_size": 1}, r"group_size must be an integer in \[2"),
    "seed": ({"seed": -1}, r"seed must be an integer in \[0"),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_unknown_variants_are_refused(source, tmp_path, what):
    changes, message = UNKNOWN[what]
    tell(source, **changes)
    with pytest.raises(VQConfigError, match=message):
        convert(str(source), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


DAMAGES = {
    "entropy": ({f"{Q}__indices": None, f"{Q}__indices_ec": torch.zeros(9).byte()},
                VQConfigError, "entropy-coded"),
    "factored": ({f"{Q}__norms": None, f"{Q}__norms__row_scale": torch.ones(64)},
                 VQConfigError, "factored"),
    "missing": ({f"{Q}__norms": None}, VQFormatError, r"lacks .*q_proj\.norms"),
    "codebook": ({"codebook": None}, VQFormatError, r"lacks .*codebook"),
    "outside": ({"codebook": torch.ones(8)}, VQFormatError, "codebook is .*expected"),
    "empty": ({f"{Q}__indices": torch.zeros(64, 32).byte()}, VQFormatError, "zeros only"),
    "nan": ({f"{Q}__norms": torch.full((64, 2), torch.nan)}, VQFormatError, "NaN"),
    "stray": ({"model_layers_9_mlp__indices": torch.zeros(2, 2).byte()}, VQFormatError,
              "belongs to no layer"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_named(source, tmp_path, what):
    changes, error, message = DAMAGES[what]
    edit(source, **changes)
    with pytest.raises(error, match=message):
        convert(str(source), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_groups_that_do_not_divide_rows(source, tmp_path):
    """That project crashes on them, or scales the tail by the root of a whole group (an
    error of .0258 instead of .0087)."""
    tell(source, group_size=48)
    with pytest.raises(VQFormatError, match="groups of 48 do not divide 64 columns"):
        convert(str(source), str(tmp_path / "out"))


def test_layers_that_cannot_be_counted(tmp_path):
    """Seeds of layers follow the order of the model's layers: one that lacks is not skipped."""
    make_turboquant(tmp_path / "in", strategy="per_layer", head=False)
    tell(tmp_path / "in", skip_lm_head=False)
    with pytest.raises(
        VQConfigError, match="'per_layer' needs codes of all linear layers: lm_head"
    ):
        convert(str(tmp_path / "in"), str(tmp_path / "out"))


def test_it_is_not_adopted():
    with pytest.raises(VQConfigError, match="Run `hf-vq convert`"):
        hf_vq.adopt("turboquant-model")
