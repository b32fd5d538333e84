"""The entry `cpu.decode`, and products of many tokens with a decoded weight, on every instruction
set of this machine."""

import pytest
import torch

from hf_vq.backends.cpu import decoded, library
from hf_vq.backends.cpu import linear as cpu_linear
from hf_vq.fit import fixed_tensors
from hf_vq.formats import VQScheme
from hf_vq.formats.stored_weight import Pass, StoredWeight
from hf_vq.ops.reference import codes as reference
from tests.unit.backends.cpu.test_linear import (
    EPS,
    OTHERS,
    SCHEMES,
    description,
    isa,  # noqa: F401
    stored,
)

pytestmark = pytest.mark.skipif(library.load() is None, reason=library.why_not())

DECODED = [*SCHEMES, *OTHERS, "turboquant-1", "turboquant-7"]


@pytest.mark.parametrize("name", DECODED)
@pytest.mark.parametrize("shape", [(3, 80), (300, 512)], ids=str)
def test_decode_is_the_reference(isa, name, shape):  # noqa: F811
    scheme, tensors = stored(name, *shape)
    rows = cpu_linear.decode(StoredWeight.of(tensors, scheme, shape[1]))
    truth = reference.decode(StoredWeight.of(tensors, scheme, shape[1]))
    # Every number is a sum of `block` numbers in either, and of the stages; then it is multiplied.
    diagonal = tensors.get("diagonal", torch.ones(shape[1])).float()
    size = (truth / diagonal).norm(dim=-1, keepdim=True) * diagonal.abs()
    assert ((rows - truth).abs() <= 4 * EPS * scheme.block(shape[1]) ** 0.5 * size).all()


def test_decode_keeps_leading_dimensions():
    scheme = VQScheme.parse("vq2x8r1-universal-g0-hadamard0")
    codebook = fixed_tensors(scheme, 64, 0)["codebook"]
    codes = torch.randint(0, 256, (2, 3, 5, 32), dtype=torch.uint8)[:, :, 1:4]
    scale = torch.rand(2, 3, 3, 1).half()
    weight = StoredWeight(Pass(codes, codebook, scale, None), None, scheme, 64)
    torch.testing.assert_close(cpu_linear.decode(weight), reference.decode(weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "name,many",
    [
        ("vq-4", True),
        ("gptvq-2", True),
        ("vq8x16r1-tensor-g0-none", True),
        ("turboquant-8", True),
        ("turboquant-7", True),
        ("turboquant-4+3", True),
        ("vq4x5r1-tensor-g0-none", False),
        ("vq-4-scaled", True),
        ("turboquant-8-scaled", True),
        ("turboquant-5-scaled", True),
        ("vq16x4r1-tensor-g0-scaled_hadamard16", True),
    ],
)
def test_product_with_the_decoded_weight(isa, name, many, dtype, monkeypatch):  # noqa: F811
    monkeypatch.setattr(decoded, "DECODED_BYTES", 1 << 15)
    scheme, tensors = stored(name, 100, 512)
    assert description(scheme, tensors, 512).has_kernel == many
    tokens = cpu_linear.few_tokens(scheme, dtype) + 1 if many else 1
    x, bias = torch.randn(2, tokens, 512).to(dtype), torch.randn(100)
    y = cpu_linear.linear(x, StoredWeight.of(tensors, scheme, x.shape[-1]), bias)
    assert y.dtype == dtype and not y._is_view()
    weight = reference.decode(StoredWeight.of(tensors, scheme, 512)).double()
    exact = x.double() @ weight.T + bias.double()
    diagonal = tensors.get("diagonal", torch.ones(512)).double()
    u, rows = (x.double() * diagonal).to(dtype), (weight / diagonal).to(dtype)
    same = (u @ rows.T + bias.to(dtype)).double()
    eps = EPS * u.double().norm() * rows.double().norm()
    assert (y.double() - exact).norm() <= 2 * (same - exact).norm() + eps
