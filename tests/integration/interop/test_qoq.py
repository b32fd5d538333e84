"""QoQ as QServe and SGLang store it: our format in another order, from safetensors and pickles."""

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hf_vq
from hf_vq.cli import main
from hf_vq.errors import VQConfigError, VQFormatError
from hf_vq.formats.published import QoqLayout
from hf_vq.interop.convert import convert
from hf_vq.nn import W4A8Linear
from hf_vq.nn.replace import vq_modules
from tests.fixtures.published_models import dense_twin, make_qoq, qoq_layer
from tests.fixtures.tiny_models import tokens

LOAD = AutoModelForCausalLM.from_pretrained
Q = "model.layers.0.self_attn.q_proj"
IN_MEMORY = "embed_tokens", "layers.0", "norm", "rotary_emb"
PLACES = {"lm_head": "cpu", "model.layers.1": "disk"} | {f"model.{n}": "cpu" for n in IN_MEMORY}


@pytest.fixture(autouse=True)
def adopted():
    hf_vq.adopt("qoq")
    yield
    hf_vq.release()


@pytest.mark.parametrize(("name", "grouped"), [("llama", False), ("wide", False), ("wide", True)])
def test_round_trip(tmp_path, name, grouped):
    dense = make_qoq(tmp_path / "in", name, grouped=grouped)
    twin = dense_twin(tmp_path / "dense", name, dense)
    model = LOAD(tmp_path / "in")
    coded = vq_modules(model)
    assert len(coded) == 14
    for layer, module in coded.items():
        assert type(module) is W4A8Linear
        assert torch.equal(module.decoded(), dense[f"{layer}.weight"]), layer
    with torch.no_grad():
        logits, exact = model(tokens()).logits, twin(tokens()).logits
    assert (logits - exact).norm() < 0.05 * exact.norm()  # inputs of 8 bits
    model.save_pretrained(tmp_path / "saved")
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "converted")]) == 0
    hf_vq.release()
    for folder in ("saved", "converted"):
        again = LOAD(tmp_path / folder)
        assert again.config.quantization_config.scheme_name == f"qoq-w4a8{'-g128' * grouped}"
        with torch.no_grad():
            assert torch.equal(again(tokens()).logits, logits)
        assert main(["info", str(tmp_path / folder)]) == 0


@pytest.mark.parametrize("grouped", [False, True])
def test_a_layer_on_disk(tmp_path, grouped):
    make_qoq(tmp_path / "in", "wide", grouped=grouped)
    model = LOAD(tmp_path / "in", device_map=PLACES, offload_folder=str(tmp_path / "offload"))
    assert model.model.layers[1].mlp.up_proj.weight.is_meta
    with torch.no_grad():
        assert torch.equal(model(tokens()).logits, LOAD(tmp_path / "in")(tokens()).logits)


@pytest.mark.parametrize("grouped", [False, True])
def test_files_of_qserve(tmp_path, grouped):
    dense = make_qoq(tmp_path / "in", "wide", grouped=grouped, pickled=True)
    with pytest.raises((VQFormatError, OSError)):  # Transformers looks for its own names
        LOAD(tmp_path / "in")
    found = convert(str(tmp_path / "in"), str(tmp_path / "out"))
    assert found["layers"] == 14
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"model.safetensors"}
    assert not list((tmp_path / "out").glob("*.pt"))
    model, info = LOAD(tmp_path / "out", output_loading_info=True)
    assert not info["unexpected_keys"] and not info["missing_keys"]
    for layer, module in vq_modules(model).items():
        assert torch.equal(module.decoded(), dense[f"{layer}.weight"]), layer


class Hostile:
    """A pickle that would write a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_hostile_pickles_are_refused_and_not_run(tmp_path):
    make_qoq(tmp_path / "in", "wide", grouped=True, pickled=True)
    file, out = tmp_path / "in" / "quant_model.pt", str(tmp_path / "out")
    tensors = torch.load(file, weights_only=True)

    def refused(match: str) -> None:
        with pytest.raises(VQFormatError, match=match):
            convert(str(tmp_path / "in"), out)
        assert not (tmp_path / "run").exists() and not (tmp_path / "out").exists()

    torch.save({**tensors, "x": Hostile(tmp_path / "run")}, file)
    refused("could run a program")
    file.write_bytes(pickle.dumps(Hostile(tmp_path / "run"), protocol=2))
    refused("could run a program")
    file.write_bytes(b"PK\x03\x04" + bytes(100))
    refused("is damaged")
    file.write_bytes(b"\x80\x02" + bytes(range(256)))
    refused("is damaged")
    torch.save([torch.ones(2)], file)
    refused("instead of named tensors")
    torch.save({**tensors, "x": {"y": torch.ones(2)}}, file)
    refused("'x' is .*instead of a plain tensor")
    torch.save({**tensors, "x": torch.ones(2).to_sparse()}, file)
    refused("'x' is .*instead of a plain tensor")
    torch.save({**tensors, "x": torch.ones(2, device="meta")}, file)
    refused(r"'x' has the shape \(2,\), and the file does not hold")
    torch.save({**tensors, "x": torch.zeros(1).expand(1 << 20, 1 << 22)}, file)  # 17 TB
    refused(r"'x' has the shape \(1048576, 4194304\), and the file does not hold")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    refused("is damaged")
    file.write_bytes(b"")
    refused("is damaged")
    torch.save({"model.norm.weight": torch.ones(128)}, file)
    with pytest.raises(VQConfigError, match="is not quantized, so there is nothing to convert"):
        convert(str(tmp_path / "in"), out)


def test_two_files_in_one_folder_are_refused(tmp_path):
    make_qoq(tmp_path / "in", "wide", grouped=True, pickled=True)
    torch.save({"x": torch.ones(2)}, tmp_path / "in" / "pytorch_model.bin")
    with pytest.raises(VQFormatError, match=r"pytorch_model\.bin and .*quant_model\.pt are two"):
        convert(str(tmp_path / "in"), str(tmp_path / "out"))


def test_damaged_tensors_are_refused(tmp_path):
    make_qoq(tmp_path, "wide", grouped=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)

    def refused(suffix: str, value: torch.Tensor, match: str) -> None:
        save_file({**tensors, f"{Q}.{suffix}": value}, file, {"format": "pt"})
        with pytest.raises(VQFormatError, match=match):
            LOAD(tmp_path)

    for suffix, wrong in (("s2_scales", 18), ("s2_scales", -1), ("s2_zeros", 1)):
        value = tensors[f"{Q}.{suffix}"].clone()
        value[0, 3] = wrong
        refused(suffix, value, rf"q_proj\.{suffix} holds -?{abs(wrong)}, where")
    scales = tensors[f"{Q}.s1_scales"].clone()
    scales[2] = torch.inf
    refused("s1_scales", scales, "NaN or infinity")
    refused("qweight", tensors[f"{Q}.qweight"][:, 1:].contiguous(), "expected torch.int8")
    steps = torch.full_like(tensors[f"{Q}.s2_scales"], 17)
    refused("s2_scales", steps, "which is not one of 8 bits")
    lacking = {name: tensor for name, tensor in tensors.items() if name != f"{Q}.s2_zeros"}
    save_file(lacking, file, {"format": "pt"})
    with pytest.raises(VQFormatError, match=r"lacks .*q_proj\.s2_zeros"):
        LOAD(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("model.norm.weight", None, r"lacks model\.norm\.weight: it would be random"),
        (
            "model.norm.weight",
            torch.ones(7),
            r"norm\.weight has the shape \(7,\), .* needs \(64,\)",
        ),
        ("model.norm.weight", torch.full((64,), torch.nan), r"norm\.weight holds NaN or infinity"),
        ("model.embed_tokens.weight", None, r"lacks model\.embed_tokens\.weight"),
        ("lm_head.weight", None, r"neither lm_head\.qweight nor lm_head\.weight"),
    ],
)
def test_dense_tensors_must_be_there(tmp_path, name, value, match):
    make_qoq(tmp_path / "in", grouped=False)
    file = tmp_path / "in" / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors if value is None else {**tensors, name: value}, file, {"format": "pt"})
    with pytest.raises(VQFormatError, match=match):
        convert(str(tmp_path / "in"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("out", "size"), [(32, 128), (96, 384)])
@pytest.mark.parametrize("grouped", [False, True])
def test_layout(out, size, grouped):
    tensors, weight = qoq_layer(out, size, grouped=grouped)
    layout = QoqLayout.of({"wbits": 4, "group_size": 128 if grouped else -1}, "X", tensors)
    layout.check(tensors, (out, size), "X")
    assert torch.equal(layout.decode(tensors, out, size), weight)
    with pytest.raises(VQFormatError, match="tiles of 32"):
        layout.expected(out + 8, size)


@pytest.mark.parametrize("wrong", [{"wbits": 8}, {"group_size": 64}, {"group_size": True}, {}])
def test_other_variants_are_refused(wrong):
    config = {"wbits": 4, "group_size": -1, **wrong} if wrong else {}
    with pytest.raises(VQConfigError, match="does not know this variant"):
        QoqLayout.of(config, "X", {})
