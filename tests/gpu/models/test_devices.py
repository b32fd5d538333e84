"""Models on a GPU, and split between a GPU, the CPU and the disk."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_vq.hf import VQConfig, explain
from hf_vq.nn.replace import vq_modules
from tests.fixtures.tiny_models import tokens

LOAD = AutoModelForCausalLM.from_pretrained
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded:UserWarning"),
]


def logits(model):
    with torch.no_grad():
        return model(tokens().to("cuda")).logits.cpu()


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3-moe"])
def test_quantized_on_the_gpu(dense, tmp_path, name):
    model = LOAD(dense(name), quantization_config=VQConfig(), device_map="cuda")
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    assert {module.device.type for module in model.buffers()} == {"cuda"}
    model.save_pretrained(tmp_path)
    again = LOAD(tmp_path, device_map="cuda")
    state = again.state_dict()
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert torch.equal(logits(again), logits(model))


def test_moving_keeps_one_codebook_per_device(quantized):
    model = LOAD(quantized()).to("cuda").to(torch.bfloat16)
    books = [module.vq_codebook for module in vq_modules(model).values()]
    assert len({book.data_ptr() for book in books}) == 1
    assert books[0].device.type == "cuda" and books[0].dtype == torch.float16
    assert {row.problem.device for row in explain(model)} == {"cuda"}


@pytest.mark.parametrize("scheme", ["qoq-w4a8", "qoq-w4a8-g32"])
def test_integers_give_the_logits_of_the_reference(dense, monkeypatch, scheme):
    """Bit by bit, of a prompt and of one token."""
    model = LOAD(
        dense("llama"), quantization_config=VQConfig(scheme), device_map="cuda",
        dtype=torch.bfloat16,
    )  # fmt: skip
    assert {row.kernel for row in explain(model)} == {"cuda.w4a8_linear"}
    given = tokens().to("cuda")
    with torch.no_grad():
        found = [model(part).logits for part in (given, given[:1, :1])]
        monkeypatch.setenv("HF_VQ_BACKEND", "reference")
        expected = [model(part).logits for part in (given, given[:1, :1])]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
@pytest.mark.parametrize("below", ["cpu", "disk"])
@pytest.mark.parametrize("activations", [None, "random"])
def test_offload_from_the_gpu(dense, quantized, tmp_path, name, below, activations):
    place = {
        "device_map": {
            "model.embed_tokens": 0, "model.norm": 0, "model.rotary_emb": 0, "lm_head": 0,
            "model.layers.0": 0, "model.layers.1": below,
        },
        "offload_folder": str(tmp_path / "offload"),
    }  # fmt: skip
    stored = LOAD(quantized(name), **place)
    experts = [m for n, m in vq_modules(stored).items() if ".1." in n]
    assert all(p.is_meta for m in experts for n, p in m.named_parameters() if n in m.specs)
    assert torch.equal(logits(stored), logits(LOAD(quantized(name), device_map="cuda")))
    config = VQConfig(activations=activations)
    flying = LOAD(dense(name), quantization_config=config, **place)
    flying.save_pretrained(tmp_path / "flying")
    whole = LOAD(tmp_path / "flying", device_map="cuda")
    assert torch.equal(logits(flying), logits(whole))
    stored.save_pretrained(tmp_path / "stored")
    state = LOAD(tmp_path / "stored").state_dict()
    expected = LOAD(quantized(name)).state_dict()
    assert all(torch.equal(state[key], value) for key, value in expected.items())
