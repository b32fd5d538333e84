"""The specification of inputs that are rounded where they are computed: the models' own modules,
then `quantize_tokens`, then `w4a8_linear`."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_vq import ops
from hf_vq.formats import linear_scheme
from hf_vq.formats.qoq import encode
from hf_vq.ops import fused_inputs

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def reference(monkeypatch):
    monkeypatch.setenv("HF_VQ_BACKEND", "reference")


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_norms_are_those_of_llama(dtype):
    norm = LlamaRMSNorm(96, eps=1e-5).to(dtype)
    norm.weight.normal_()
    x = (torch.randn(3, 5, 96) * torch.logspace(-4, 4, 5)[:, None]).to(dtype)
    x[2, 3, 7], x[1] = torch.inf, 0
    found = fused_inputs.rms_norm(x, norm.weight, 1e-5)
    assert torch.equal(found.nan_to_num(7), norm(x).nan_to_num(7))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["qoq-w4a8", "qoq-w4a8-g32"])
@torch.no_grad()
def test_products_are_those_of_floats(name, dtype):
    tensors, bias = encode(torch.randn(24, 96), linear_scheme(name)), torch.randn(24)
    x, up, weight = (torch.randn(2, 3, 96).to(dtype) for _ in range(3))
    fused = fused_inputs.fused_inputs(x, name, 24)
    assert fused is fused_inputs.reference
    for rounded, floats in (
        (fused.tokens(x), x),
        (fused.norm(x, weight[0, 0], 1e-6), fused_inputs.rms_norm(x, weight[0, 0], 1e-6)),
        (fused.gated(x, up), torch.nn.functional.silu(x) * up),
    ):
        for added in (bias, None):
            y = fused_inputs.linear(fused, rounded, x, tensors, added, name)
            assert y.dtype == dtype and y.shape == (2, 3, 24)
            assert torch.equal(y, ops.w4a8_linear(floats, tensors, added, name))
