"""HIGGS: FLUTE's packing undone, pairs as a codebook, a Hadamard transform of the input."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hf_vq
from hf_vq.cli import main
from hf_vq.errors import VQConfigError, VQFormatError
from hf_vq.formats.published import HiggsLayout
from hf_vq.nn import VQLinear
from hf_vq.nn.replace import vq_modules
from hf_vq.transforms import rotate
from tests.fixtures.published_models import higgs_layer, make_higgs
from tests.fixtures.tiny_models import tokens

LOAD = AutoModelForCausalLM.from_pretrained
Q = "model.layers.0.self_attn.q_proj"
VARIANTS = {
    "4 bits, bfloat16": {"bits": 4, "template": 95, "tile": 32, "dtype": torch.bfloat16},
    "2 bits": {"bits": 2, "template": 11, "tile": 32},
}


@pytest.fixture(autouse=True)
def adopted():
    hf_vq.adopt("higgs")
    yield
    hf_vq.release()


@pytest.mark.parametrize(
    ("bits", "out", "tile"), [(2, 256, 32), (2, 512, 64), (3, 512, 32), (4, 128, 32), (4, 512, 64)]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_layers(bits, out, tile, dtype):
    tensors, exact = higgs_layer(out, 64, bits=bits, group=16, hadamard=32, tile=tile, dtype=dtype)
    viewed = dtype == torch.bfloat16
    layout = HiggsLayout(bits, 16, 32, tile, str(dtype).removeprefix("torch."), viewed)
    layout.check(tensors, (out, 64), "X")
    rotated = layout.rotation()
    found = rotate(layout.decode(tensors, out, 64), rotated, inverse=True)
    # The transform adds 32 numbers of float32.
    assert (found - exact).abs().max() <= 32 * 2**-23 * exact.abs().max()
    if dtype == torch.float16:
        made = {key: layout.stored(s, tensors[s], "X") for s, key in layout.scheme_keys.items()}
        ours = hf_vq.ops.reference.codes.decode_rotated(
            made["codes"], made["codebook"], made["scale"], layout.scheme(), 64
        )
        assert torch.equal(ours, layout.decode(tensors, out, 64))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.usefixtures("reference_kernels")
def test_round_trip(tmp_path, variant):
    dense = make_higgs(tmp_path / "in", **VARIANTS[variant])
    model = LOAD(tmp_path / "in")
    coded = vq_modules(model)
    assert len(coded) == 7
    for layer, module in coded.items():
        # Numbers of bfloat16 become float16 where they fit.
        assert type(module) is VQLinear or "bfloat16" in variant
        exact = dense[f"{layer}.weight"]
        assert (module.decoded() - exact).abs().max() <= 128 * 2**-23 * exact.abs().max()
    with torch.no_grad():
        logits = model(tokens()).logits
    model.save_pretrained(tmp_path / "saved")
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "converted")]) == 0
    for folder in ("saved", "converted"):
        with torch.no_grad():
            assert torch.equal(LOAD(tmp_path / folder)(tokens()).logits, logits)
        assert main(["info", str(tmp_path / folder)]) == 0


def test_damage_is_named(tmp_path):
    make_higgs(tmp_path / "in", **VARIANTS["2 bits"])
    file, path = tmp_path / "in" / "model.safetensors", tmp_path / "in" / "config.json"
    whole, config = load_file(file), json.loads(path.read_text())
    for suffix in ("weight", "scales", "tables2"):
        save_file({k: v for k, v in whole.items() if k != f"{Q}.{suffix}"}, file)
        with pytest.raises(VQFormatError, match=rf"lacks {Q}\.{suffix}"):
            LOAD(tmp_path / "in")
    save_file(whole, file)
    del config["quantization_config"]["tune_metadata"][Q]
    path.write_text(json.dumps(config))
    with pytest.raises(VQConfigError, match=rf"tune_metadata says nothing of {Q}"):
        LOAD(tmp_path / "in")


def test_unknown_templates():
    tensors, _ = higgs_layer(512, 32, bits=3, group=16, hadamard=32, tile=32)
    config = {"bits": 3, "group_size": 16, "hadamard_size": 32}
    for template, match in ((0, "tiles of 32 only"), (36, "no template 36")):
        about = {**config, "tune_metadata": {"X": {"template_id": template}}}
        with pytest.raises(VQConfigError, match=match):
            HiggsLayout.of(about, "X", tensors)
    about = {**config, "tune_metadata": {"X": {"template_id": 35}}}
    assert HiggsLayout.of(about, "X", tensors).tile == 32
