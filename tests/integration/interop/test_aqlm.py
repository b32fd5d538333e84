"""Published checkpoints: loaded, generated from, saved in our format, converted, refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM
from transformers.quantizers import auto

import hf_vq
from hf_vq.cli import main
from hf_vq.errors import VQConfigError, VQFormatError
from hf_vq.formats.published import AqlmLayout
from hf_vq.interop import convert as converting
from hf_vq.nn import VQLinear
from hf_vq.nn.dense_head import DenseHead
from hf_vq.nn.published import PublishedLinear
from hf_vq.nn.replace import vq_modules
from tests.fixtures.published_models import aqlm_layer, dense_twin, make_aqlm
from tests.fixtures.tiny_models import tokens

LOAD = AutoModelForCausalLM.from_pretrained
VARIANTS = {
    "1x16": ("llama", {"bits": 16}),
    "2x8, bias": ("qwen3", {"books": 2}),
    "1x8 g16": ("llama", {"group": 16}),
    "3x5 g4, tied head": ("llama-tied", {"books": 3, "bits": 5, "group": 4}),
    "2x12, coded head": ("llama", {"books": 2, "bits": 12, "head": True}),
    "experts": ("mixtral", {"books": 2, "shards": 3}),
    "2 rows": ("llama", {"rows": 2}),
    "float32": ("llama", {"dtype": torch.float32}),
    "experts, 4 rows": ("mixtral", {"rows": 4, "group": 4, "books": 2, "dtype": torch.bfloat16}),
}


@pytest.fixture(autouse=True)
def adopted():
    hf_vq.adopt("aqlm")
    yield
    hf_vq.release()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.usefixtures("reference_kernels")
def test_round_trip(tmp_path, variant):
    name, options = VARIANTS[variant]
    dense = make_aqlm(tmp_path / "in", name, **options)
    twin = dense_twin(tmp_path / "dense", name, dense)
    model = LOAD(tmp_path / "in")
    coded = vq_modules(model)
    assert sum(name.count("lm_head") for name in coded) == options.get("head", False)
    expected = twin.state_dict()
    for layer, module in coded.items():
        assert isinstance(module, PublishedLinear) == ("rows" in variant or variant == "float32")
        own = layer.replace("mlp.experts", "block_sparse_moe.experts")
        assert torch.equal(module.decoded(), dense[f"{own}.weight"]), layer
    for key in expected.keys() & model.state_dict().keys():
        if key.removesuffix(".weight") not in coded:
            assert torch.equal(model.state_dict()[key], expected[key]), key
    with torch.no_grad():
        logits, exact = model(tokens()).logits, twin(tokens()).logits
    # Experts are summed in another order than Transformers does.
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


def test_in_a_new_process(tmp_path, run_python, root):
    """What is saved in our format needs no `adopt`."""
    kept = {}
    for variant in ("2x8, bias", "experts", "2 rows"):
        name, options = VARIANTS[variant]
        make_aqlm(tmp_path / "in" / name, name, **options)
        model = LOAD(tmp_path / "in" / name)
        with torch.no_grad():
            kept[name] = model(tokens()).logits
        model.save_pretrained(tmp_path / name)
    torch.save({"x": tokens(), "logits": kept}, tmp_path / "kept.pt")
    code = f"""
import torch, hf_vq
from transformers import AutoModelForCausalLM
kept = torch.load({str(tmp_path / "kept.pt")!r})
with torch.no_grad():
    for name, logits in kept["logits"].items():
        model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r} + "/" + name)
        print(torch.equal(model(kept["x"]).logits, logits))
"""
    assert run_python(code, PYTHONPATH=str(root)).split() == ["True"] * 3


def test_of_a_base_model_and_from_one(tmp_path):
    """Names with the prefix of the base model, read by the model without a head, and back."""
    make_aqlm(tmp_path / "in", head=True)
    base = AutoModel.from_pretrained(tmp_path / "in")
    whole = LOAD(tmp_path / "in")
    assert set(vq_modules(base)) == {
        name.removeprefix("model.") for name in vq_modules(whole) if name != "lm_head"
    }
    base.save_pretrained(tmp_path / "base")
    again = AutoModel.from_pretrained(tmp_path / "base")
    assert torch.equal(again(tokens())[0], whole.model(tokens())[0])


def test_the_list_of_skipped_layers_may_name_modules_or_parameters(tmp_path):
    """In Transformers 5.23 `lm_head.weight` matches no module: the head would be random."""
    for skips in (["lm_head.weight", "model.embed_tokens.weight"], ["lm_head"], []):
        dense = make_aqlm(tmp_path / "in", skips=skips)
        model = LOAD(tmp_path / "in")
        assert type(model.lm_head) is DenseHead
        assert torch.equal(model.lm_head.weight, dense["lm_head.weight"])


def test_codes_keep_their_order_when_the_model_runs(tmp_path):
    """The package aqlm swaps rows and columns of codes at the first call on a CPU."""
    make_aqlm(tmp_path / "in")
    model = LOAD(tmp_path / "in")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model(tokens())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def edit(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file)


Q, EXPERT = "model.layers.0.self_attn.q_proj", "model.layers.1.block_sparse_moe.experts.2.w3"


def set_item(tensors, key, value):
    tensors[key] = value


def poison(tensors, key, value):
    tensors[key].view(-1)[0] = value


DAMAGES = {
    "codes": (lambda t: t.pop(f"{Q}.codes"), rf"lacks {Q}\.codes"),
    "codebooks": (lambda t: t.pop(f"{Q}.codebooks"), rf"lacks {Q}\.codebooks"),
    "scales": (lambda t: t.pop(f"{Q}.scales"), rf"lacks {Q}\.scales"),
    "layer": (
        lambda t: [t.pop(f"{Q}.{s}") for s in ("codes", "codebooks", "scales")],
        rf"neither {Q}\.codes nor {Q}\.weight",
    ),
    "head": (lambda t: t.pop("model.norm.weight"), None),
    "swapped": (
        lambda t: set_item(t, f"{Q}.codes", t[f"{Q}.codes"].transpose(0, 1)),
        r"Rows and columns are swapped.*package aqlm",
    ),
    "dtype": (
        lambda t: set_item(t, f"{Q}.codes", t[f"{Q}.codes"].short()),
        rf"{Q}\.codes is torch\.int16.*expected torch\.int8",
    ),
    "books": (
        lambda t: set_item(t, f"{Q}.codebooks", t[f"{Q}.codebooks"][:, :128]),
        rf"{Q}\.codebooks is .*\[2, 128, 1, 8\].*expected.*\[2, 256, 1, 8\]",
    ),
    "nan": (
        lambda t: poison(t, f"{Q}.scales", float("nan")),
        rf"{Q}\.scales holds NaN",
    ),
    "stray": (
        lambda t: set_item(t, "model.embed_tokens.codes", t[f"{Q}.codes"].clone()),
        r"model\.embed_tokens\.codes are codes, but model\.embed_tokens is a Embedding",
    ),
}


@pytest.mark.parametrize("damage", [name for name, (_, match) in DAMAGES.items() if match])
@pytest.mark.parametrize("how", ["load", "convert"])
def test_damage_is_named(tmp_path, damage, how):
    make_aqlm(tmp_path / "in", books=2)
    change, match = DAMAGES[damage]
    edit(tmp_path / "in", change)
    with pytest.raises(VQFormatError, match=f"(?s){match}"):
        if how == "load":
            LOAD(tmp_path / "in")
        else:
            converting.convert(str(tmp_path / "in"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_codes_outside_of_the_codebook(tmp_path):
    make_aqlm(tmp_path / "in", bits=5)
    edit(tmp_path / "in", lambda t: poison(t, f"{Q}.codes", 16))
    with pytest.raises(VQFormatError, match=rf"{Q}\.codes holds code 16.*2\^5.*-16 to 15"):
        LOAD(tmp_path / "in")


def test_an_expert_without_codes(tmp_path):
    make_aqlm(tmp_path / "in", "mixtral")

    def change(tensors):
        for suffix in ("codes", "codebooks", "scales"):
            del tensors[f"{EXPERT}.{suffix}"]

    edit(tmp_path / "in", change)
    with pytest.raises(VQFormatError, match=r"lacks model\.layers\.1\.mlp\.experts\.2\.w3\.codes"):
        LOAD(tmp_path / "in")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nbits_per_codebook", 17),
        ("num_codebooks", 0),
        ("in_group_size", "8"),
        ("out_group_size", None),
    ],
)
def test_unknown_variants(tmp_path, field, value):
    make_aqlm(tmp_path / "in")
    path = tmp_path / "in" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"][field] = value
    path.write_text(json.dumps(config))
    with pytest.raises(VQConfigError, match=f"{field} must be an integer.*does not know"):
        LOAD(tmp_path / "in")


def test_adopt_and_release():
    methods = auto.AUTO_QUANTIZER_MAPPING
    ours = methods["aqlm"]
    hf_vq.adopt()  # again, and the others
    hf_vq.release("aqlm")
    assert methods["aqlm"] is not ours and methods["aqlm"].__module__.startswith("transformers.")
    assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING["aqlm"].__module__.startswith("transformers.")
    hf_vq.release()
    hf_vq.release()
    with pytest.raises(VQConfigError, match="not a method that from_pretrained can know: aqlm"):
        hf_vq.adopt("gptq")


def test_a_dense_model_is_not_made_into_one(dense):
    config = {"quant_method": "aqlm", "num_codebooks": 1}
    with pytest.raises(VQConfigError, match=r"does not make them.*VQConfig"):
        LOAD(dense("llama"), quantization_config=config)


def test_a_file_that_is_no_safetensors(tmp_path):
    make_aqlm(tmp_path / "in")
    state = load_file(tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "model.safetensors").unlink()
    torch.save(state, tmp_path / "in" / "pytorch_model.bin")
    with pytest.raises(VQFormatError, match="save it as safetensors"):
        LOAD(tmp_path / "in")


def test_explain_says_what_is_decoded_at_every_call(tmp_path):
    make_aqlm(tmp_path / "in", rows=2)
    found = hf_vq.explain(LOAD(tmp_path / "in"))
    assert found[0].kernel == "reference" and "--requantize" in str(found)
    make_aqlm(tmp_path / "3x7", bits=7, books=3, group=4)
    found = hf_vq.explain(LOAD(tmp_path / "3x7"))
    if found[0].kernel == "cpu.linear":
        assert "VQ<4,7,3> has no kernel that multiplies with codes" in str(found)
    make_aqlm(tmp_path / "1x16", bits=16)
    found = hf_vq.explain(LOAD(tmp_path / "1x16"))
    assert found[0].kernel != "cpu.linear" or "has no kernel" not in str(found)


def test_a_killed_conversion_goes_on(tmp_path, monkeypatch):
    make_aqlm(tmp_path / "in", shards=3)
    source, out = str(tmp_path / "in"), str(tmp_path / "out")
    real, calls = converting._Conversion._one, []

    def fails_at_the_second(self, *args, **kwargs):
        calls.append(args[0])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    monkeypatch.setattr(converting._Conversion, "_one", fails_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        converting.convert(source, out)
    assert not (tmp_path / "out").exists()
    with pytest.raises(VQConfigError, match="unfinished conversion of something else"):
        converting.convert(source, out, requantize=hf_vq.VQConfig("vq-4"))
    found = converting.convert(source, out)
    assert len(calls) == 4 and len(set(calls)) == 3  # the first file was not done again
    converting.convert(source, str(tmp_path / "at once"))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {path.name for path in (tmp_path / "at once").iterdir()}
    assert found["layers"] == 14 and "model.safetensors.index.json" in names
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "at once" / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["at once", "in", "out"]


def test_the_verification_compares_what_was_written(tmp_path, monkeypatch):
    make_aqlm(tmp_path / "in")
    save = converting.save_file

    def damaged(tensors, path, metadata):
        tensors[f"{Q}.weight"] ^= 1
        save(tensors, path, metadata)

    monkeypatch.setattr(converting, "save_file", damaged)
    with pytest.raises(VQFormatError, match=rf"{Q}: what was written does not decode"):
        converting.convert(str(tmp_path / "in"), str(tmp_path / "out"))


def test_requantize(tmp_path, capsys):
    dense = make_aqlm(tmp_path / "in", "mixtral", bits=4, shards=2)
    arguments = [str(tmp_path / "in"), str(tmp_path / "out"), "--requantize", "vq-4"]
    assert main(["convert", *arguments]) == 0
    assert "mean relative error" in capsys.readouterr().out
    model = LOAD(tmp_path / "out")
    for name, module in vq_modules(model).items():
        assert type(module) is VQLinear and module.scheme.notation() == "VQ<2,8,1>"
        exact = dense[f"{name.replace('mlp.experts', 'block_sparse_moe.experts')}.weight"]
        error = (module.decoded().detach() - exact).square().sum() / exact.square().sum()
        recorded = model.config.quantization_config.provenance["relative_error"][name]
        assert error < 0.02 and recorded == pytest.approx(float(error), rel=1e-3)


@pytest.mark.parametrize(
    "more",
    [
        {"embeddings": "int8"},
        {"layers": {"down_proj": "vq-2"}},
        {"target_bits": 3.0},
        {"calibration": {"text": "model", "finetune": "block"}},
        {"pass2": "offload"},
        {"activations": "model"},
        {"modules_to_not_convert": ["down_proj"]},
    ],
)
def test_requantize_takes_no_more_than_it_does(tmp_path, more):
    config = hf_vq.VQConfig("turboquant-4+4", seed=3, search="norm", **more)
    (name,) = more
    with pytest.raises(VQConfigError, match=rf"scheme, seed and search; got .*{name}"):
        converting.convert(str(tmp_path / "in"), str(tmp_path / "out"), requantize=config)


def test_what_convert_does_not_read(tmp_path, dense, capsys):
    assert main(["convert", str(dense("llama")), str(tmp_path / "out")]) == 2
    assert "not quantized, so there is nothing to convert" in capsys.readouterr().err
    (tmp_path / "gptq").mkdir()
    shutil.copy(Path(dense("llama")) / "model.safetensors", tmp_path / "gptq")
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "gptq" / "config.json").write_text(json.dumps(config))
    assert main(["convert", str(tmp_path / "gptq"), str(tmp_path / "out")]) == 2
    assert "hf-vq convert reads aqlm, vptq, higgs" in capsys.readouterr().err
    (tmp_path / "quip").mkdir()
    (tmp_path / "quip" / "config.json").write_text('{"quip_params": {"codebook": "E8P12"}}')
    assert main(["convert", str(tmp_path / "quip"), str(tmp_path / "out")]) == 2
    assert "QuIP#, which hf_vq does not read" in capsys.readouterr().err


@pytest.mark.parametrize(("books", "bits", "group"), [(1, 16, 8), (2, 8, 8), (2, 11, 6), (1, 8, 5)])
@pytest.mark.parametrize("rows", [1, 3])
def test_against_the_package(monkeypatch, books, bits, group, rows):
    """Tensors of aqlm's own class, packed by its own function, decoded by its own formula."""
    monkeypatch.setenv("AQ_USE_JIT", "0")  # torch.jit.script warns that it is deprecated
    aqlm = pytest.importorskip("aqlm", reason="the package aqlm is not installed")
    from aqlm.utils import _dequantize_weight, pack_int_data, unpack_int_data

    out, size = 7 * rows, 3 * group
    layer = aqlm.QuantizedLinear(size, out, group, rows, books, bits, dtype=torch.float16)
    layer.codebooks.data.normal_()
    layer.scales.data.uniform_(0.5, 1.5)
    codes = torch.randint(0, 1 << bits, layer.codes.shape)
    layer.codes.data = pack_int_data(codes.clone(), bits)
    tensors = {name: getattr(layer, name).detach() for name in AqlmLayout.suffixes}
    layout = AqlmLayout(books, bits, group, rows)
    layout.check(tensors, (out, size), "X")
    unpacked = unpack_int_data(layer.codes, bits)
    exact = _dequantize_weight(unpacked, layer.codebooks.float(), layer.scales.float())
    assert torch.equal(layout.decode(tensors, out, size), exact)
    half = _dequantize_weight(unpacked, layer.codebooks, layer.scales)
    if books == 1:  # the product of two float16 is exact in float32
        assert torch.equal(layout.decode(tensors, out, size).half(), half)
    scheme = layout.scheme()
    assert (scheme is None) == (rows > 1)
    if scheme is not None:
        made = {layout.scheme_keys[s]: layout.stored(s, t, "X") for s, t in tensors.items()}
        assert torch.equal(hf_vq.ops.decode_weight(made, scheme, size, torch.float32), exact)


@pytest.mark.parametrize(("out", "size"), [(1, 8), (3, 24), (5, 40), (130, 8)])
@pytest.mark.parametrize("bits", [1, 3, 8, 9, 15, 16])
@pytest.mark.parametrize("books", [1, 2, 3])
def test_odd_sizes(out, size, bits, books):
    tensors, weight = aqlm_layer(out, size, books=books, bits=bits, group=8)
    layout = AqlmLayout(books, bits)
    layout.check(tensors, (out, size), "X")
    assert torch.equal(layout.decode(tensors, out, size), weight)
    made = {layout.scheme_keys[s]: layout.stored(s, t, "X") for s, t in tensors.items()}
    found = hf_vq.ops.decode_weight(made, layout.scheme(), size, torch.float32)
    assert torch.equal(found, weight)
