"""The PyTorch path on a GPU gives what it gives on the CPU."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_vq import VQCache, VQConfig, ops
from hf_vq.fit import fit_weight, fixed_tensors
from hf_vq.formats import KV_SCHEMES, WEIGHT_SCHEMES, weight_scheme
from hf_vq.formats.shared import universal_tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def decoded(fitted, scheme, device):
    tensors = {**fixed_tensors(scheme, 256, 0, device), **fitted.tensors}
    return ops.decode_weight(tensors, scheme, 256).cpu()


@pytest.mark.parametrize("name", WEIGHT_SCHEMES)
def test_fit_on_cuda_is_as_good(name):
    scheme = weight_scheme(name)
    weight = torch.randn(64, 256)
    on_cpu, on_cuda = fit_weight(weight, scheme), fit_weight(weight.cuda(), scheme)
    assert all(tensor.is_cuda for tensor in on_cuda.tensors.values())
    assert on_cuda.relative_error == pytest.approx(on_cpu.relative_error, rel=0.01)
    if scheme.codebook == "universal":
        # The rotation is a matrix product. Its rounding may decide between two scales that are as
        # good, and all codes of a group with them; else it moves a weight across a cell's border.
        alike = (on_cuda.tensors["scale"].cpu() == on_cpu.tensors["scale"]).all(1)
        moved = on_cuda.tensors["codes"].cpu() != on_cpu.tensors["codes"]
        assert alike.float().mean() > 0.9 and moved[alike].float().mean() < 0.01
    x = torch.randn(3, 256)
    y = ops.linear(
        x.cuda(), {**fixed_tensors(scheme, 256, 0, "cuda"), **on_cuda.tensors}, None, scheme
    )
    exact = x.double() @ decoded(on_cuda, scheme, "cuda").double().T
    assert (y.cpu() - exact).norm() <= 1e-5 * exact.norm()


@pytest.mark.parametrize("name", ["u4", "u3", "u2"])
def test_encode_on_cuda_is_encode_on_cpu(name):
    scheme = KV_SCHEMES[name].key
    codebook = universal_tensor(scheme)
    rows = torch.randn(2, 4, 33, 128)
    codes, scale = ops.encode_kv(rows, codebook, scheme)
    codes_cuda, scale_cuda = ops.encode_kv(rows.cuda(), codebook.cuda(), scheme)
    assert (codes_cuda.cpu() != codes).float().mean() < 0.001
    assert ((scale_cuda.cpu().float() - scale.float()).abs() <= 0.01 * scale.float()).all()


@pytest.mark.parametrize("implementation", ["sdpa", "vq", "eager"])
@pytest.mark.parametrize("offloading", [False, True])
def test_generate_on_cuda(tinybooks, implementation, offloading):
    model = AutoModelForCausalLM.from_pretrained(
        tinybooks,
        quantization_config=VQConfig(),
        device_map="cuda",
        dtype=torch.float32,
        attn_implementation=implementation,
    )
    prompt = torch.arange(100, 200)[None].cuda()

    def generate(offloading):
        cache = VQCache(model.config, offloading=offloading)
        return model.generate(
            prompt, max_new_tokens=24, do_sample=False, past_key_values=cache, eos_token_id=None
        )

    out = generate(offloading)
    assert out.shape == (1, 124)
    assert torch.equal(out, generate(False))


def test_quantize_on_cuda_save_and_reload_on_cpu(tinybooks, tmp_path, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(
        tinybooks, quantization_config=VQConfig(), device_map="cuda", dtype=torch.float32
    )
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for (name, ours), theirs in zip(
        model.state_dict().items(), again.state_dict().values(), strict=True
    ):
        assert torch.equal(ours.cpu(), theirs), name
    ids = torch.arange(50, 80)[None]
    logits = model(ids.cuda()).logits.cpu()
    monkeypatch.setenv("HF_VQ_BACKEND", "reference")  # kernels for the CPU round inputs to 8 bits
    assert (logits - again(ids).logits).norm() <= 1e-4 * logits.norm()


def test_split_over_gpu_cpu_and_disk(tinybooks, tmp_path):
    whole = AutoModelForCausalLM.from_pretrained(
        tinybooks, quantization_config=VQConfig(), device_map="cuda", dtype=torch.float32
    )
    whole.save_pretrained(tmp_path / "model")
    split = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model",
        dtype=torch.float32,
        offload_folder=tmp_path / "offload",
        device_map={
            "model.embed_tokens": 0,
            "model.rotary_emb": 0,
            "model.layers.0": 0,
            "model.layers.1": "cpu",
            "model.layers.2": "disk",
            "model.layers.3": 0,
            "model.norm": 0,
            "lm_head": 0,
        },
    )
    ids = torch.arange(50, 80)[None].cuda()
    a, b = whole(ids).logits, split(ids).logits
    assert torch.equal(a, b)
