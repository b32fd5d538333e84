"""A model's files are what was saved, with the config that says what they mean: or an error."""

import json
import random
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from hf_vq import patches
from hf_vq.cli import main
from hf_vq.errors import VQFormatError
from hf_vq.formats import digests
from hf_vq.formats.digests import Check, Header
from hf_vq.hf import VQConfig
from hf_vq.hf.checkpoint.integrity import checkpoints, meanings, record
from hf_vq.hf.checkpoint.verify import Verification
from tests.fixtures.tiny_models import tokens

LOAD = AutoModelForCausalLM.from_pretrained
pytestmark = pytest.mark.filterwarnings("ignore:.*without calibration data")

LAYER = "model.layers.1.mlp.up_proj"
OTHER = "vq2x8r1-universal-g64-random_hadamard128"
KINDS = {
    "vq-4": ("llama", {"scheme": "vq-4"}),
    "turboquant-4": ("llama", {"scheme": "turboquant-4"}),
    "quip-sharp-2": ("llama", {"scheme": "quip-sharp-2"}),
    "qr": ("llama", {"scheme": "vq2x8r1-universal-g128-qr128", "seed": 3}),
    "aqlm-2-int7": ("llama", {"scheme": "aqlm-2-int7"}),
    "gptvq-2": ("llama", {"scheme": "gptvq-2"}),
    "qoq": ("llama", {"scheme": "qoq-w4a8-g128"}),
    "two passes": ("llama", {"scheme": "turboquant-4+4"}),
    "layers": ("llama", {"layers": {LAYER: OTHER}}),
    "experts": ("qwen3-moe", {"scheme": "vq-4"}),
    "embeddings": ("llama-tied", {"embeddings": "int8"}),
    "shards": ("llama", {"scheme": "vq-4"}),
}


@pytest.fixture(scope="module")
def saved(dense, tmp_path_factory):
    """`saved("vq-4")`: the folder of a tiny model of a kind."""
    folders = {}

    def find(kind):
        if kind not in folders:
            name, options = KINDS[kind]
            folders[kind] = tmp_path_factory.mktemp("integrity") / "model"
            model = LOAD(dense(name), quantization_config=VQConfig(**options))
            size = "20KB" if kind == "shards" else "1GB"
            model.save_pretrained(folders[kind], max_shard_size=size)
        return folders[kind]

    return find


@pytest.fixture
def copy(saved, tmp_path):
    """A copy of such a folder, to be damaged."""

    def make(kind):
        return shutil.copytree(saved(kind), tmp_path / "copy")

    return make


def compare(folder):
    """What a load compares, without the load."""
    config = VQConfig.from_dict(config_of(folder)["quantization_config"])
    recorded = config.provenance["digests"]
    Check(checkpoints(folder)[""], lambda h: meanings(config, h)).finish(True, recorded)


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def edit(folder, change):
    config = config_of(folder)
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


def parts_of(folder):
    """Every tensor with its file."""
    for path in checkpoints(folder)[""]:
        for part in Header(path).parts.values():
            yield path, part


def flip(path, part):
    with path.open("r+b") as file:
        at = random.randrange(part.begin, part.end)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << random.randrange(8)]))


def rewrite(path, change):
    """Change the tensors of a file; its metadata stays."""
    tensors, metadata = load_file(path), Header(path).metadata
    change(tensors)
    save_file(tensors, path, metadata)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bit_of_any_kind_of_tensor(copy, kind):
    """Codes, scales, signs, zeros, codebooks, embeddings, norms, biases: one of each."""
    folder = copy(kind)
    compare(folder)
    LOAD(folder)
    one_of = {
        re.sub(r"\d+|[qkvo]_proj", "", p.name): (f, p) for f, p in parts_of(folder) if p.nbytes
    }
    assert len(one_of) > 8
    for path, part in one_of.values():
        raw = path.read_bytes()
        flip(path, part)
        with pytest.raises(VQFormatError, match=f"{path}.*{re.escape(part.name)} is not what was"):
            compare(folder)
        path.write_bytes(raw)
    path, part = random.choice(list(one_of.values()))
    flip(path, part)
    with pytest.raises(VQFormatError, match=re.escape(part.name.removeprefix("model."))):
        LOAD(folder)


def test_random_bits_end_every_load(copy):
    folder = copy("vq-4")
    path = folder / "model.safetensors"
    raw, start = path.read_bytes(), Header(path).start
    for _ in range(12):
        damaged = bytearray(raw)
        bit = random.randrange(8 * start, 8 * len(raw))
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(VQFormatError):
            LOAD(folder)


def put(**fields):
    return lambda config: config["scheme"].update(fields)


EDITS = {
    "rotation_block": ("vq-4", put(rotation_block=16), r"layers.0.mlp.down_proj.*hadamard16"),
    "rotation_block of a lattice": ("quip-sharp-2", put(rotation_block=16), "hadamard16"),
    "rotation": ("aqlm-2-int7", put(rotation="hadamard"), "-hadamard128"),
    "a layer's scheme": (
        "layers",
        lambda c: c["layers"].update({LAYER: OTHER.replace("hadamard128", "hadamard16")}),
        rf"{LAYER}\.\w+ is not what was saved \(.*hadamard16",
    ),
    "a layer more": (
        "vq-4",
        lambda c: c.update(
            layers={LAYER: "vq2x8r1-universal-g128-random_hadamard16"}, format_version=2
        ),
        rf"{LAYER}\.\w+ is not what was saved",
    ),
    "experts": ("experts", put(rotation_block=16), "experts.vq_down_proj_codes is not what was"),
    "second pass": ("two passes", put(rotation_block=16), "vq_codes_2 is not what was saved"),
    "shards": ("shards", put(rotation_block=16), "model-0000.-of-.*is not what was saved"),
}


@pytest.mark.parametrize("change", EDITS)
def test_what_gives_codes_their_meaning(copy, change):
    """Every one of these loads, with other weights, where digests are not compared."""
    kind, edited, says = EDITS[change]
    folder = copy(kind)
    edit(folder, edited)
    with pytest.raises(VQFormatError, match=says):
        LOAD(folder)


def test_what_is_said_of_a_layer_that_has_another_name_in_the_file(saved):
    """Whichever entries of a table the names in a file mean: each belongs to some meaning."""
    headers = [Header(path) for path in checkpoints(saved("vq-4"))[""]]
    schemes = "vq2x8r1-universal-g128-random_hadamard16", OTHER

    def found(name, scheme):
        return meanings(VQConfig("vq-4", layers={name: scheme}), headers)

    for name in (LAYER, LAYER.removeprefix("model."), f"text.{LAYER}"):
        one, other = (found(name, scheme) for scheme in schemes)
        differ = {name for name in one if one[name] != other[name]}
        assert {name.rpartition(".")[0] for name in differ} == {LAYER}
    one, other = (found("encoder.fc", scheme) for scheme in schemes)
    assert all(one[name] != other[name] for name in one) and one


def test_dense_tensors_have_no_meaning_but_their_bytes(saved):
    headers = [Header(path) for path in checkpoints(saved("vq-4"))[""]]
    config = VQConfig.from_dict(config_of(saved("vq-4"))["quantization_config"])
    coded = set(meanings(config, headers))
    names = {part.name for _, part in parts_of(saved("vq-4"))}
    rest = {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"}
    rest |= {
        f"model.layers.{i}.{n}_layernorm.weight"
        for i in (0, 1)
        for n in ("input", "post_attention")
    }
    assert names - coded == rest | {"vq_codebook.gauss_2x8"}


def swap(one, other):
    def change(tensors):
        tensors[one], tensors[other] = tensors[other], tensors[one]

    return change


SCALES = [f"model.layers.{layer}.self_attn.q_proj.vq_scale" for layer in (0, 1)]
NORMS = [f"model.layers.{layer}.input_layernorm.weight" for layer in (0, 1)]
TENSORS = {
    "swapped scales": (swap(*SCALES), f"{SCALES[0]} is not what was saved"),
    "swapped norms": (swap(*NORMS), f"{NORMS[1]} is not what was saved"),
    "renamed": (lambda t: t.update({"model.norm.bias": t.pop("model.norm.weight")}), "model.norm"),
    "removed": (lambda t: t.pop(NORMS[0]), NORMS[0]),
    "no embedding": (lambda t: t.pop("model.embed_tokens.weight"), "embed_tokens"),
    "added": (lambda t: t.update(extra=torch.ones(1)), "extra was not saved with the others"),
}


@pytest.mark.parametrize("change", TENSORS)
def test_tensors_that_are_swapped_renamed_or_removed(copy, change):
    edited, says = TENSORS[change]
    folder = copy("vq-4")
    rewrite(folder / "model.safetensors", edited)
    with pytest.raises(VQFormatError, match=says):
        LOAD(folder)


def test_files_of_two_saves(saved, dense, tmp_path):
    """Each file is right by itself: a save that was killed while it moved its files."""
    other = torch.manual_seed(5) and LOAD(dense("llama"))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    other.save_pretrained(tmp_path / "dense")
    model = LOAD(tmp_path / "dense", quantization_config=VQConfig("vq-4"))
    model.save_pretrained(tmp_path / "new", max_shard_size="20KB")
    folder = shutil.copytree(saved("shards"), tmp_path / "mixed")
    names = [path.name for path in checkpoints(folder)[""]]
    assert names == [path.name for path in checkpoints(tmp_path / "new")[""]]
    shutil.copy(tmp_path / "new" / names[0], folder / names[0])
    with pytest.raises(VQFormatError, match=r"not the files that config\.json was saved with"):
        LOAD(folder)


def forget(folder, config=True):
    """A folder as older versions, or other programs, write it."""
    for path in checkpoints(folder)[""]:
        save_file(load_file(path), path, {"format": "pt"})
    if config:
        edit(folder, lambda c: c["provenance"].pop("digests"))


@pytest.mark.parametrize("kind", ["vq-4", "shards"])
def test_an_older_model_loads_with_one_line(copy, saved, caplog, kind):
    folder = copy(kind)
    forget(folder)
    model = LOAD(folder)
    lines = [r.getMessage() for r in caplog.records if "digests" in r.getMessage()]
    assert len(lines) == 1 and str(folder) in lines[0] and "carries no digests" in lines[0]
    assert torch.equal(model(tokens()).logits, LOAD(saved(kind))(tokens()).logits)
    caplog.clear()
    model.save_pretrained(folder)
    compare(folder)
    LOAD(folder)
    assert "digests" not in caplog.text


def test_the_hashes_of_codebooks_count_in_an_older_model(copy):
    folder = copy("vq-4")
    forget(folder)
    double = lambda t: t["vq_codebook.gauss_2x8"].mul_(2)  # noqa: E731
    rewrite(folder / "model.safetensors", double)
    with pytest.raises(VQFormatError, match=r"not the one that config\.json records"):
        LOAD(folder)


def test_a_model_that_lost_its_digests(copy):
    folder = copy("shards")
    forget(folder, config=False)
    with pytest.raises(VQFormatError, match="lost the digests that it was saved with"):
        LOAD(folder)
    first = checkpoints(folder)[""][0]
    forget(folder)
    digests.record([first])
    with pytest.raises(VQFormatError, match="carries no digests, as the other files do"):
        LOAD(folder)


def test_checking_can_be_left_out(copy, monkeypatch, caplog):
    folder = copy("vq-4")
    before = LOAD(folder)(tokens()).logits
    edit(folder, put(rotation_block=16))
    monkeypatch.setenv("HF_VQ_VERIFY", "0")
    assert not torch.equal(LOAD(folder)(tokens()).logits, before)
    forget(folder)
    LOAD(folder)
    assert "digests" not in caplog.text


def test_what_may_change_after_saving(copy):
    """Generation settings, the card, an evaluation, other fields of config.json."""
    folder = copy("vq-4")
    model = LOAD(folder)
    model.generation_config.max_length = 30
    model.generation_config.save_pretrained(folder)
    config = config_of(folder)
    config |= {"use_cache": False, "my_note": "mine"}
    config["quantization_config"]["search"] = "norm"
    config["quantization_config"]["provenance"]["evaluation"] = {"perplexity": 3.0}
    (folder / "config.json").write_text(json.dumps(config))
    assert LOAD(folder).config.quantization_config.provenance["evaluation"]


def test_a_load_keeps_no_digest_that_a_later_save_would_write(saved, tmp_path):
    model = LOAD(saved("vq-4"))
    assert "digests" not in model.config.quantization_config.provenance
    model.config.save_pretrained(tmp_path)
    assert "digests" not in config_of(tmp_path)["quantization_config"]["provenance"]


def test_the_base_model_and_a_head(copy, tmp_path):
    """Names in the file with the prefix of the base model or without, a table with it."""
    folder = copy("layers")
    AutoModel.from_pretrained(folder).save_pretrained(tmp_path / "base")
    assert LAYER in config_of(tmp_path / "base")["quantization_config"]["layers"]
    model = LOAD(tmp_path / "base")
    assert model.get_submodule(LAYER).scheme.spec() == OTHER
    AutoModel.from_pretrained(tmp_path / "base")
    edit(tmp_path / "base", EDITS["a layer's scheme"][1])
    with pytest.raises(VQFormatError, match=LAYER.removeprefix("model.")):
        LOAD(tmp_path / "base")


@pytest.mark.filterwarnings("ignore:You passed")
@pytest.mark.parametrize("pass2", ["absent", "offload", {"q_proj": "absent"}])
def test_second_passes_that_are_elsewhere(saved, tmp_path, pass2):
    model = LOAD(saved("two passes"), quantization_config=VQConfig(pass2=pass2))
    model.save_pretrained(tmp_path)
    compare(tmp_path)
    LOAD(tmp_path)


def test_files_of_variants_are_checked(saved, tmp_path, caplog):
    model = LOAD(saved("vq-4"))
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    model.save_pretrained(tmp_path, variant="b", max_shard_size="20KB")
    LOAD(tmp_path)
    LOAD(tmp_path, variant="b")
    assert "digests" not in caplog.text
    path, part = next((f, p) for f, p in parts_of(tmp_path) if p.name == "model.norm.weight")
    flip(path, part)
    LOAD(tmp_path, variant="b")
    with pytest.raises(VQFormatError, match=r"model\.norm\.weight"):
        LOAD(tmp_path)


@pytest.mark.parametrize("variant", ["b", "v1.5"])
def test_a_variant_beside_files_that_were_saved_later(saved, tmp_path, variant, caplog):
    model = LOAD(saved("vq-4"))
    model.save_pretrained(tmp_path, variant=variant)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    model.save_pretrained(tmp_path)
    LOAD(tmp_path)
    LOAD(tmp_path, variant=variant)
    assert "digests" not in caplog.text


def test_saving_twice_is_bit_equal(saved, tmp_path):
    model = LOAD(saved("shards"))
    for name in "ab":
        model.save_pretrained(tmp_path / name, max_shard_size="20KB")
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_no_shard_is_written_twice(saved, tmp_path, monkeypatch):
    """`get_state_dict_and_metadata` leaves room for the digests in each header."""
    monkeypatch.setattr(digests.shutil, "copyfileobj", None)
    for kind in ("shards", "experts", "embeddings"):
        LOAD(saved(kind)).save_pretrained(tmp_path / kind)


def test_a_file_that_transformers_wrote_alone_carries_none(saved, tmp_path, caplog):
    model = LOAD(saved("vq-4"))
    patches.end_codes(model)
    model.save_pretrained(tmp_path)
    LOAD(tmp_path)
    assert "carries no digests" in caplog.text
    record(tmp_path)
    caplog.clear()
    LOAD(tmp_path)
    assert "digests" not in caplog.text


# The command.


def test_verify_a_model(copy, capsys):
    folder = copy("shards")
    assert main(["verify", str(folder)]) == 0
    count = sum(1 for _ in parts_of(folder))
    shown = capsys.readouterr().out
    assert f"compared {count} tensors" in shown and "files" in shown and "all as saved" in shown
    damaged = [(f, p) for f, p in parts_of(folder) if p.name in (*SCALES, *NORMS)]
    for path, part in damaged:
        flip(path, part)
    assert main(["verify", str(folder)]) == 1
    shown = capsys.readouterr().out
    assert [line.split()[2] for line in shown.splitlines()[:-1]] == sorted(
        (p.name for _, p in damaged), key=lambda name: shown.index(name)
    )
    assert shown.count("damaged: ") == 4 and "all as saved" not in shown


def test_verify_says_what_is_missing(copy, capsys):
    folder = copy("shards")
    files = checkpoints(folder)[""]
    files[1].unlink()
    files[2].write_bytes(files[2].read_bytes()[:-1])
    assert main(["verify", str(folder)]) == 1
    shown = capsys.readouterr().out
    assert f"damaged: {files[1]} is missing" in shown and "truncated" in shown


def test_verify_without_digests(copy, capsys):
    folder = copy("vq-4")
    forget(folder, config=False)
    assert main(["verify", str(folder)]) == 1
    assert "lost the digests" in capsys.readouterr().out
    forget(folder)
    assert main(["verify", str(folder)]) == 3
    assert f"no digests: {folder / 'model.safetensors'}" in capsys.readouterr().out


def test_verify_looks_at_every_file_of_a_folder(copy, capsys):
    folder = copy("vq-4")
    model = LOAD(folder)
    model.save_pretrained(folder, variant="b")
    part = next(p for f, p in parts_of(folder) if p.name == SCALES[0])
    flip(folder / "model.b.safetensors", part)
    assert main(["verify", str(folder)]) == 1
    assert "model.b.safetensors" in capsys.readouterr().out
    assert Verification(folder).run().files == 2


@pytest.mark.parametrize("what", ["nothing", "dense", "shard", "text"])
def test_verify_what_it_cannot(dense, copy, capsys, tmp_path, what):
    path = {
        "nothing": tmp_path / "absent", "dense": dense("llama"), "text": tmp_path / "text",
        "shard": copy("vq-4") / "model.safetensors",
    }[what]  # fmt: skip
    (tmp_path / "text").write_text("hello")
    assert main(["verify", str(path)]) == 2
    assert "hf-vq: error: " in capsys.readouterr().err


def test_verify_a_model_of_the_hub(hub, copy, capsys):
    model = LOAD(copy("vq-4"))
    model.push_to_hub("me/model")
    assert main(["verify", "me/model"]) == 0
    assert "all as saved" in capsys.readouterr().out
