"""`VQConfig()` runs a model once where it can; elsewhere its codes are data-free, and a line says
why."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    Llama4TextConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

import hf_vq
from hf_vq.calibration import activations, offload
from hf_vq.calibration.text import context_of, halved_batches
from hf_vq.errors import VQFormatError
from hf_vq.hf import VQConfig, calibration_options
from hf_vq.hf.quantizer import logger
from hf_vq.nn.experts import VQSortedExperts
from hf_vq.nn.replace import vq_modules
from hf_vq.progress import Progress
from tests.fixtures.calibration import logits
from tests.fixtures.tiny_models import tokens

LOAD = AutoModelForCausalLM.from_pretrained
FAST = {"search": "norm"}
pytestmark = pytest.mark.filterwarnings("ignore:vq-3 loses much quality")


@pytest.fixture
def said(monkeypatch):
    """Lines of the log."""
    lines = []
    monkeypatch.setattr(logger, "warning", lambda line, *args: lines.append(line % args))
    monkeypatch.setattr(logger, "warning_once", logger.warning)
    return lines


def load(folder, kind=AutoModelForCausalLM, activations=None, **options):
    given = {} if activations is None else {"activations": activations}
    return kind.from_pretrained(
        folder, quantization_config=VQConfig("vq-3", **FAST, **given), **options
    )


def streamed(folder, kind=AutoModelForCausalLM, **options):
    config = VQConfig("vq-3", **FAST, activations=None)
    return kind.from_pretrained(folder, quantization_config=config, **options)


def facts(model):
    return model.config.quantization_config.provenance.get("activations")


def equal(one, other):
    """Whether two models hold the same numbers, those that are offloaded left out."""
    here, there = one.state_dict(), other.state_dict()
    assert here.keys() == there.keys()
    return all(torch.equal(here[key], there[key]) for key in here if not here[key].is_meta)


def without(folder, target, *names):
    """A copy of a checkpoint that lacks some tensors."""
    target.mkdir()
    state = load_file(folder / "model.safetensors")
    assert set(names) <= set(state)
    kept = {key: tensor for key, tensor in state.items() if key not in names}
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text((folder / "config.json").read_text())
    return target


def test_it_is_the_default(dense, said):
    model = load(dense("llama"))
    assert facts(model)["text"] == "model" and facts(model)["layers"] == 14 and not said
    assert equal(model, load(dense("llama"), activations="model"))
    assert not equal(model, streamed(dense("llama")))


@pytest.mark.parametrize("done", [0, 3, 9])
def test_an_interrupted_call_leaves_whole_layers(dense, done, monkeypatch):
    original, ids, counted = LOAD(dense("llama")), tokens(), []

    class Interrupted(Progress):
        def done(self) -> None:
            counted.append(self)
            if len(counted) > done:
                raise KeyboardInterrupt

    model = LOAD(dense("llama"))
    monkeypatch.setattr(activations, "Progress", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        hf_vq.quantize_model(model, VQConfig(**FAST))
    monkeypatch.undo()
    assert len(vq_modules(model)) == (7 if done > 7 else 0), "whole blocks"
    for name, module in original.named_modules():
        left = model.get_submodule(name)
        if isinstance(module, nn.Linear) and type(left) is nn.Linear:
            assert torch.equal(left.weight, module.weight) and not left._forward_pre_hooks
    assert all("forward" not in vars(module) for module in model.modules())
    assert logits(model, ids).isfinite().all()
    hf_vq.dequantize(model)
    hf_vq.quantize_model(model, VQConfig(**FAST))
    assert len(vq_modules(model)) == 14


def test_an_interrupted_load_does_the_next_no_harm(dense, monkeypatch):
    def interrupt(self, index, *args):
        raise KeyboardInterrupt

    expected = load(dense("llama"))
    for place, name in ((activations.Blocks, "run"), (activations, "replace_layers")):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(place, name, interrupt)
            load(dense("llama"))
    assert equal(load(dense("llama")), expected)


@pytest.mark.usefixtures("reference_kernels")
def test_experts_of_llama4_stay_data_free(tmp_path, said):
    config = Llama4TextConfig(
        hidden_size=32, intermediate_size=32, intermediate_size_mlp=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_local_experts=2,
        vocab_size=64, interleave_moe_layer_step=1, bos_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model, plain = load(tmp_path), streamed(tmp_path)
    assert sum(isinstance(module, VQSortedExperts) for module in model.modules()) == 2
    found, expected = model.state_dict(), plain.state_dict()
    same = {key for key in found if torch.equal(found[key], expected[key])}
    assert {key for key in found if ".experts." in key} <= same
    assert not {key for key in found if key.endswith("_proj.weight")} & same and not said
    assert facts(model)["fallbacks"] == {}


def test_experts_that_are_called_in_another_way_stay_data_free(dense, said, monkeypatch):
    def refuse(self, layer, experts):
        raise TypeError("another forward")

    monkeypatch.setattr(activations.Listener, "_experts", refuse)
    model, plain = load(dense("qwen3-moe")), streamed(dense("qwen3-moe"))
    found, expected = model.state_dict(), plain.state_dict()
    same = {key for key in found if torch.equal(found[key], expected[key])}
    assert {key for key in found if "experts" in key} <= same
    assert not {key for key in found if key.endswith("_proj.weight")} & same
    weights = ("gate_up_proj", "down_proj")
    experts = {f"model.layers.{i}.mlp.experts.{name}" for i in (0, 1) for name in weights}
    assert set(facts(model)["fallbacks"]) == experts
    (line,) = said
    assert "4 of 12 tensors are quantized without activations" in line and "another forward" in line


DISK = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu",
        "lm_head": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"device_map": DISK}, "weights are offloaded"),
        ({"device_map": "auto", "max_memory": {"cpu": "320KB"}}, "0.0 GB are free"),
        ({"device_map": "sequential", "max_memory": {"cpu": "120KB"}}, "0.0 GB are free"),
    ],
)
def test_what_places_leave_no_room_for(dense, tmp_path, said, options, why):
    options["offload_folder"] = tmp_path
    model, plain = load(dense("llama"), **options), streamed(dense("llama"), **options)
    assert facts(model) is None and len(said) == 1 and why in said[0]
    assert getattr(model, "hf_device_map", None) == getattr(plain, "hf_device_map", None)
    assert equal(model, plain)
    torch.testing.assert_close(logits(model, tokens()), logits(plain, tokens()))


def test_other_places_have_room(dense, said):
    expected = load(dense("llama"))
    for places in ({"": "cpu"}, "cpu", "auto", dict.fromkeys(DISK, "cpu")):
        assert equal(load(dense("llama"), device_map=places), expected)
    assert not said


def test_a_dense_model_that_fits_only_in_part_is_not_loaded(dense, said, monkeypatch):
    """Its places would be of the disk, and codes would be offloaded that fit into memory."""
    monkeypatch.setattr(activations, "_ROOM", 0)
    options = {"device_map": "auto", "max_memory": {"cpu": "200KB"}}  # and no offload_folder
    model = load(dense("llama"), **options)
    assert facts(model) is None and len(said) == 1 and "offloaded" in said[0]
    assert equal(model, streamed(dense("llama"), **options))


def test_memory_of_control_groups(tmp_path):
    """Files as in version 2 and 1: a limit of a group above counts, files in memory do not."""
    root, groups = tmp_path / "cgroup", tmp_path / "groups"

    def write(folder, names, limit, used, stat):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in zip((*names[:2], "memory.stat"), (limit, used, stat), strict=True):
            (folder / name).write_text(f"{text}\n")

    groups.write_text("0::/pod/box\n")
    assert offload._of_control_groups(groups, root) is None
    write(root / "pod" / "box", offload._FILES_2, "max", 10, "anon 5\ninactive_file 4")
    assert offload._of_control_groups(groups, root) is None
    write(root / "pod", offload._FILES_2, 1000, 700, "anon 5\ninactive_file 300")
    assert offload._of_control_groups(groups, root) == 600
    groups.write_text("3:cpu,cpuacct:/x\n9:memory:/x\n0::/\n")
    write(root / "memory" / "x", offload._FILES_1, 50, 60, "total_inactive_file 2")
    assert offload._of_control_groups(groups, root) == 0


def test_processes_of_a_machine_share_its_memory(monkeypatch):
    monkeypatch.setattr(offload, "_available", lambda: 1000)
    monkeypatch.setattr(offload, "_of_control_groups", lambda: 800)
    assert offload.free_memory("cpu") == 800
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert offload.free_memory("cpu") == 200
    assert offload.free_memory("meta") is None


def test_memory_is_compared_by_place(dense, monkeypatch):
    model = LOAD(dense("llama")).to("meta")
    total = 4 * sum(parameter.numel() for parameter in model.parameters())
    head = 4 * model.lm_head.weight.numel()
    places, free = {"": 0, "lm_head": "cpu", "model.norm": "disk"}, {}
    monkeypatch.setattr(offload, "free_memory", free.get)
    for cuda, cpu, fits in ((total, head, True), (total, head - 1, False), (head, head, False)):
        free |= {"cuda:0": cuda, "cpu": cpu}
        assert (offload.shortage(model, places, 1.0) is None) == fits
    assert offload.shortage(model, "auto", 1.0) is None
    loaded = LOAD(dense("llama"))  # it needs room for activations and codes only, where it is
    for cpu, fits in ((total // 2, True), (total // 2 - 4, False)):
        free["cpu"] = cpu
        assert (offload.shortage(loaded, {"": 0}, 1.5) is None) == fits


def test_several_processes_stay_data_free(dense, said, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = load(dense("llama"))
    assert len(said) == 1 and "several processes" in said[0] and facts(model) is None
    assert equal(model, streamed(dense("llama")))


@pytest.mark.parametrize("name", ["embed_tokens.weight", "layers.0.input_layernorm.weight"])
def test_numbers_that_no_file_has_are_not_read(dense, tmp_path, said, name):
    name = f"model.{name}"
    folder = without(dense("llama"), tmp_path / "cut", name)
    model, plain = load(folder), streamed(folder)
    assert len(said) == 1 and f"the checkpoint lacks {name}" in said[0]
    codes = [key for key in model.state_dict() if "_proj" in key]
    assert all(torch.equal(model.state_dict()[key], plain.state_dict()[key]) for key in codes)
    assert facts(model) == {"layers": 0, "fallbacks": {}, "failed": f"the checkpoint lacks {name}"}
    with pytest.raises(VQFormatError, match=f"lacks {name}"):
        load(folder, activations="model")


def test_a_layer_that_no_file_has_is_an_error_as_before(dense, tmp_path):
    name = "model.layers.1.mlp.up_proj"
    folder = without(dense("llama"), tmp_path / "cut", f"{name}.weight")
    for one in (load, streamed):
        with pytest.raises(VQFormatError, match=f"lacks {name}, so there is nothing to quantize"):
            one(folder)


def test_a_base_model_and_one_with_a_head(dense, tmp_path, said):
    whole = load(dense("llama"))
    base = load(dense("llama"), AutoModel)
    assert facts(base)["text"] == "random" and "writes no text" in said.pop()
    LlamaForCausalLM.from_pretrained(dense("llama")).model.save_pretrained(tmp_path)
    headed = load(tmp_path)
    assert facts(headed)["text"] == "random" and "output head is not in" in said.pop()
    assert equal(headed.model, base) and headed.lm_head.weight.isfinite().all()
    assert not equal(whole.model, base) and not said


def test_a_classifier_has_the_codes_of_its_base(dense, said):
    options = {"num_labels": 5, "pad_token_id": 2}
    model = load(dense("llama"), LlamaForSequenceClassification, **options)
    assert type(model.score) is nn.Linear and facts(model)["text"] == "random"
    assert len(vq_modules(model)) == 14 and len(said) == 1


def test_another_size_of_the_vocabulary_is_not_read(dense, said):
    options = {"vocab_size": 104, "ignore_mismatched_sizes": True}
    model = load(dense("llama"), **options)
    assert facts(model)["layers"] == 0 and "lacks model.embed_tokens.weight" in said[0]
    assert len(vq_modules(model)) == 14 and logits(model, tokens()).isfinite().all()


def test_another_number_of_labels_changes_nothing(tmp_path, said):
    config = BertConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        vocab_size=96, max_position_embeddings=64,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(tmp_path)
    model = load(tmp_path, BertForMaskedLM)
    assert facts(model)["text"] == "random" and len(said) == 1
    assert facts(model)["layers"] == 6 and facts(model)["fallbacks"] == {}


def test_a_pass_that_fails_is_not_recorded_as_one(dense, tmp_path, said, monkeypatch):
    def fail(self, index, *args):
        raise ValueError("no such thing")

    monkeypatch.setattr(activations.Blocks, "run", fail)
    for given in (None, "model"):
        model = load(dense("llama"), activations=given)
        assert facts(model) == {
            "layers": 0, "fallbacks": {},
            "failed": "the model cannot run (ValueError: no such thing)",
        }  # fmt: skip
        assert equal(model, streamed(dense("llama")))
    model.save_pretrained(tmp_path)
    assert "tokens that" not in (tmp_path / "README.md").read_text()
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert "activations" not in stored and "failed" in stored["provenance"]["activations"]


def test_a_pass_that_fails_halfway_says_how_far_it_came(dense, tmp_path, said, monkeypatch):
    run = activations.Blocks.run

    def fail(self, index, *args):
        if index:
            raise ValueError("no such thing")
        return run(self, index, *args)

    monkeypatch.setattr(activations.Blocks, "run", fail)
    model = load(dense("llama"))
    assert facts(model)["layers"] == 7 and "no such thing" in facts(model)["failed"]
    assert len(said) == 1 and "7 of 14 tensors are quantized without activations" in said[0]
    model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "2,048 tokens that the model wrote, in 7 of 14 tensors" in card


@pytest.mark.parametrize("place", ["context_of", "find_blocks"])
def test_models_that_are_odd_stay_data_free(dense, said, monkeypatch, place):
    def fail(*args):
        raise AttributeError("no such thing")

    monkeypatch.setattr(activations, place, fail)
    if place == "find_blocks":  # a decoder without a list of blocks runs as a whole
        monkeypatch.setattr(
            activations, place, lambda *_: (_ for _ in ()).throw(activations.VQCalibrationError())
        )
    model = load(dense("llama"))
    assert facts(model)["layers"] == (0 if place == "context_of" else 14)
    assert len(said) == (place == "context_of")


@pytest.mark.parametrize(("count", "length"), [(16, 64), (4, 256), (5, 100), (2, 512), (3, 600)])
def test_batches_are_of_one_half_in_turn(count, length):
    ids = torch.arange(count * length).reshape(count, length)
    batches = halved_batches(ids, 512)
    assert len({batch.shape for batch in batches}) == 1
    assert all(len(batch) == 1 or batch.numel() <= 512 for batch in batches)
    for half in (0, 1):
        assert torch.equal(torch.cat(batches[half::2]), ids[half::2])
    assert halved_batches(ids[:0], 512) == []


@pytest.mark.parametrize("longest", [-1, 0])
def test_models_without_a_longest_text(dense, longest):
    model = LOAD(dense("llama"))
    model.config.max_position_embeddings = longest
    assert context_of(model, None) == 2048 and context_of(model, 4096) == 4096


def test_calibration_is_advised_where_the_pass_falls_back(dense, monkeypatch, said):
    monkeypatch.setattr(calibration_options, "_advised", set())
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match="vq-3 loses much quality without activations or cal"):
        load(dense("llama"))
    for config in ("aqlm-3", "gptvq-2"):  # no pass can help
        with pytest.warns(UserWarning, match=f"{config} loses much quality without activations or"):
            VQConfig(config)


def test_other_modules_are_quantized_without_data(said):
    model = hf_vq.quantize_model(nn.Sequential(nn.Linear(64, 64)))
    assert len(vq_modules(model)) == 1
    assert said == [
        "hf_vq: the layers are quantized without activations: Sequential is no model of "
        "Transformers."
    ]


def test_in_memory_codes_are_those_of_a_load(dense, said):
    model = hf_vq.quantize_model(LOAD(dense("llama")), VQConfig("vq-3", **FAST))
    assert equal(model, load(dense("llama"))) and facts(model)["layers"] == 14 and not said


def test_a_weight_that_is_not_finite_changes_nothing(dense):
    model = LOAD(dense("llama"))
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")
    with pytest.raises(VQFormatError, match=r"layers\.1\.mlp\.up_proj holds NaN"):
        hf_vq.quantize_model(model)
    assert not vq_modules(model)
