"""Published checkpoints on a GPU: the weights of the file, products by whichever kernel runs."""

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM

import hf_vq
from hf_vq.nn.replace import vq_modules
from tests.fixtures.published_models import make_aqlm, make_higgs, make_qoq, make_vptq
from tests.fixtures.tiny_models import tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FIXED = Version("5.23")  # the oldest seen without it; 5.17 has it
LOAD = AutoModelForCausalLM.from_pretrained
MODELS = {
    "aqlm 1x16": (make_aqlm, {"bits": 16}),
    "aqlm 2x8, bias": (make_aqlm, {"name": "qwen3", "books": 2}),
    "aqlm 2x8, wide": (make_aqlm, {"name": "wide", "books": 2}),
    "aqlm 1x8 g16": (make_aqlm, {"group": 16}),
    "aqlm 3x5 g4, tied head": (
        make_aqlm,
        {"name": "llama-tied", "books": 3, "bits": 5, "group": 4},
    ),
    "aqlm 2x12, coded head": (make_aqlm, {"books": 2, "bits": 12, "head": True}),
    "aqlm experts": (make_aqlm, {"name": "mixtral", "books": 2, "shards": 3}),
    "aqlm 2 rows": (make_aqlm, {"rows": 2}),
    "aqlm float32": (make_aqlm, {"dtype": torch.float32}),
    "vptq v8-k256": (make_vptq, {}),
    "vptq v8-k256-16, bias": (make_vptq, {"name": "qwen3", "residual": 16}),
    "vptq v6-k4096": (make_vptq, {"vector": 6, "count": 4096, "norm": False}),
    "vptq outliers": (make_vptq, {"name": "llama-tied", "outliers": 4, "residual": 32}),
    "vptq groups": (make_vptq, {"groups": 2, "shared": True, "shards": 2}),
    "vptq experts": (make_vptq, {"name": "mixtral", "count": 16, "perm": False}),
    "vptq float32": (make_vptq, {"dtype": torch.float32, "outliers": 2}),
    "higgs 4 bits": (make_higgs, {"bits": 4, "template": 95, "tile": 32, "dtype": torch.bfloat16}),
    "higgs 2 bits": (make_higgs, {"bits": 2, "template": 11, "tile": 32}),
    "qoq": (make_qoq, {"grouped": False}),
    "qoq groups": (make_qoq, {"name": "wide", "grouped": True}),
}


@pytest.fixture(autouse=True)
def adopted():
    hf_vq.adopt()
    yield
    hf_vq.release()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("model", MODELS)
def test_a_published_model_on_a_gpu_is_the_one_on_the_cpu(tmp_path, monkeypatch, model, dtype):
    if "experts" in model and dtype == torch.float16 and Version(transformers.__version__) < FIXED:
        pytest.skip("Transformers leaves renamed tensors of such checkpoints as the file has them")
    make, options = MODELS[model]
    make(tmp_path / "in", **options)
    here = LOAD(tmp_path / "in", device_map="cpu", dtype=torch.float32)
    there = LOAD(tmp_path / "in", device_map="cuda", dtype=dtype)
    layers = vq_modules(here)
    assert len(layers) >= 7 and layers.keys() == vq_modules(there).keys()
    for name, layer in vq_modules(there).items():
        check_layer(layer, layers[name].decoded(), dtype, "higgs" in model, "qoq" in model)
    found = there(tokens().cuda()).logits
    if dtype == torch.float32:
        with monkeypatch.context() as patch:
            patch.setenv("HF_VQ_BACKEND", "reference")
            wanted = here(tokens()).logits
        limit = 0.05 if "qoq" in model else 1e-4  # a unit of an input of 8 bits moves others
        assert (found.cpu() - wanted).norm() <= limit * wanted.norm()
    made = there.generate(tokens().cuda(), max_new_tokens=3, do_sample=False)
    assert made.is_cuda and made.shape == (2, 12)
    there.save_pretrained(tmp_path / "saved")
    hf_vq.release()
    again = LOAD(tmp_path / "saved", device_map="cuda", dtype=dtype)
    assert torch.equal(again(tokens().cuda()).logits, found)


def check_layer(layer, exact, dtype, rotated, integers):
    """Weights are those of the file, and products are theirs, for one token and for many."""
    weight = layer.decoded()
    # A rotation adds up to 128 numbers of float32.
    limit = 128 * 2**-23 * exact.abs().max() if rotated else 0
    assert weight.is_cuda and torch.isfinite(exact).all()
    assert (weight.cpu().float() - exact.to(weight.dtype).float()).abs().max() <= limit
    for count in (1, 5, 40):
        x = torch.randn(count, exact.shape[-1], device="cuda").to(dtype)
        wanted = x.cpu().double() @ exact.double().T
        if getattr(layer, "bias", None) is not None:
            wanted += layer.bias.cpu().double()
        # Inputs of 8 bits are off by half a step of their largest one; else dtypes round.
        error = 0.02 if integers else 8 * torch.finfo(x.dtype).eps
        assert (layer(x).cpu().double() - wanted).norm() <= error * wanted.norm(), count
