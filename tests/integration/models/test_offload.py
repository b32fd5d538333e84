"""device_map with layers on the CPU and on disk, on the fly and from a saved model."""

import pytest
import torch
from accelerate import cpu_offload
from transformers import AutoModelForCausalLM

from hf_vq.errors import VQConfigError
from hf_vq.hf import VQConfig, explain
from hf_vq.nn.replace import vq_modules
from tests.fixtures.tiny_models import tokens

LOAD = AutoModelForCausalLM.from_pretrained
LAYERS = {"gpt2": "transformer.h"}
pytestmark = pytest.mark.filterwarnings(
    "ignore:Attempting to save a model with offloaded:UserWarning",
    "ignore:Current model requires:UserWarning",
)


def logits(model):
    device = "cpu" if model.device.type == "meta" else model.device  # meta: all is offloaded
    with torch.no_grad():
        return model(tokens().to(device)).logits.cpu()


def device_map(kind, name):
    layers = LAYERS.get(name, "model.layers")
    if kind == "all on disk":
        return {"": "disk"}
    top = layers.split(".")[0]
    parts = {
        "transformer": ["wte", "wpe", "ln_f"],
        "model": ["embed_tokens", "norm", "rotary_emb"],
    }[top]
    mapped = {f"{top}.{part}": "cpu" for part in parts}
    return {**mapped, "lm_head": "cpu", f"{layers}.0": "cpu", f"{layers}.1": "disk"}


@pytest.mark.parametrize("kind", ["one layer on disk", "all on disk"])
@pytest.mark.parametrize(
    ("name", "scheme"),
    [(n, "vq-4") for n in ("llama", "llama-tied", "gpt2", "qwen3-moe", "gpt-oss")]
    + [("llama", "qoq-w4a8"), ("llama", "qoq-w4a8-g128")],
)
def test_offload(dense, quantized, tmp_path, name, scheme, kind):
    whole = LOAD(quantized(name, scheme))
    expected = logits(whole)
    place = {"device_map": device_map(kind, name), "offload_folder": str(tmp_path / "offload")}
    flying = LOAD(dense(name), quantization_config=VQConfig(scheme), **place)
    assert any(parameter.is_meta for parameter in flying.parameters())
    assert torch.equal(logits(flying), expected)
    flying.save_pretrained(tmp_path / "flying", max_shard_size="30KB")
    stored = LOAD(quantized(name, scheme), **place)
    assert torch.equal(logits(stored), expected)
    stored.save_pretrained(tmp_path / "stored")
    for folder in ("flying", "stored"):
        again, info = LOAD(tmp_path / folder, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        state = again.state_dict()
        assert all(torch.equal(state[key], value) for key, value in whole.state_dict().items())


def test_saving_over_the_files_that_are_offloaded(quantized, tmp_path):
    LOAD(quantized()).save_pretrained(tmp_path / "m")
    place = {"device_map": {"": "disk"}, "offload_folder": str(tmp_path / "offload")}
    model = LOAD(tmp_path / "m", **place)
    before = (tmp_path / "m" / "model.safetensors").read_bytes()
    model.save_pretrained(tmp_path / "m")
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == before


def test_cpu_offload_hooks(quantized):
    model = LOAD(quantized())
    expected = logits(model)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.model.layers[0].mlp.up_proj.weight.is_meta
    assert torch.equal(logits(model), expected)
    assert {row.problem.device for row in explain(model)} == {"cpu"}


def test_an_automatic_device_map(quantized):
    model = LOAD(quantized(), device_map="auto")
    assert torch.equal(logits(model), logits(LOAD(quantized()).to(model.device)))


def test_an_offloaded_model_is_not_dequantized(quantized, tmp_path):
    model = LOAD(quantized(), device_map={"": "disk"}, offload_folder=str(tmp_path))
    with pytest.raises(VQConfigError, match="offload"):
        model.dequantize()
    assert vq_modules(model)
