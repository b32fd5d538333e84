"""The entry `cpu.input_gradient` on every instruction set of this machine: dL/dx = dL/dy W."""

import pytest
import torch

from hf_vq import dispatch, ops
from hf_vq.backends.cpu import decoded, library
from hf_vq.formats.stored_weight import StoredWeight, flat
from hf_vq.ops.reference import codes as reference
from tests.unit.backends.cpu.test_linear import isa, stored  # noqa: F401

pytestmark = pytest.mark.skipif(library.load() is None, reason=library.why_not())
EPS = torch.finfo(torch.float32).eps
NAMES = [
    "vq-4", "vq-2", "turboquant-4", "turboquant-7", "quip-sharp-4", "aqlm-3", "gptvq-2",
    "vq-4-scaled", "quip-sharp-2-scaled", "turboquant-4+4", "turboquant-1+2-scaled",
    "vq4x8r2-tensor-g32-none", "vq2x8r1-universal-g16-hadamard64",
    "vq4x8r1-universal-g512-scaled_hadamard0",
]  # fmt: skip


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_product_with_the_decoded_weight(isa, name, dtype, parts, monkeypatch):  # noqa: F811
    if parts:
        monkeypatch.setattr(decoded, "DECODED_BYTES", 1 << 15)
    scheme, tensors = stored(name, 100, 512)
    weight = StoredWeight.of(tensors, scheme, 512)
    grad = torch.randn(2, 7, 100).to(dtype)
    found = decoded.input_gradient(grad, weight)
    assert found.dtype == dtype and found.shape == (2, 7, 512)
    rows = reference.decode(weight)
    exact = grad.double() @ rows.double()
    same = (grad @ rows.to(dtype)).double()
    eps = EPS * grad.double().norm() * rows.double().norm()
    assert (found.double() - exact).norm() <= 2 * (same - exact).norm() + eps


def test_training_uses_it():
    scheme, tensors = stored("vq-4", 24, 256)
    called = []
    entry = next(e for e in dispatch.entries("input_gradient") if e.name == "cpu.input_gradient")

    def count(grad, weight):
        called.append(grad.shape)
        return decoded.input_gradient(grad, weight)

    counting = dispatch.Entry("counting", "input_gradient", dispatch.Implementation(count))
    assert (
        dispatch.select(
            dispatch.InputGradientProblem("cpu", "float32", scheme.spec(), 4, 24, 256)
        ).name
        == entry.name
    )
    x = torch.randn(3, 256, requires_grad=True)
    with dispatch.preferred(counting):
        ops.linear(x, tensors, None, scheme).sum().backward()
    assert called == [(3, 24)]
    wanted = reference.decode(StoredWeight.of(tensors, scheme, 256)).sum(0).expand(3, 256)
    torch.testing.assert_close(x.grad, wanted)


@pytest.mark.parametrize("shape", [(24,), (0, 24)])
def test_one_row_and_none(shape):
    scheme, tensors = stored("vq-4", 24, 256)
    weight = StoredWeight.of(tensors, scheme, 256)
    assert decoded.input_gradient(torch.ones(shape), weight).shape == (*shape[:-1], 256)


def test_codes_and_scales_of_other_memory():
    """Codes with gaps between rows, and a scale that trains as float32."""
    scheme, tensors = stored("vq-4", 24, 256)
    grad = torch.randn(3, 24)
    wanted = decoded.input_gradient(grad, StoredWeight.of(tensors, scheme, 256))
    gaps = torch.stack([tensors["codes"]] * 2, 1)[:, 0]
    other = {**tensors, "codes": gaps, "scale": tensors["scale"].float()}
    assert not gaps.is_contiguous()
    assert torch.equal(decoded.input_gradient(grad, StoredWeight.of(other, scheme, 256)), wanted)


@pytest.mark.parametrize(
    ("stages", "name"), [("nested", "cpu.input_gradient"), ("shared", "reference")]
)
def test_which_passes_are_for_the_reference(stages, name):
    spec = f"vq1x4+4r2-universal-g128-hadamard128-{stages}"
    problem = dispatch.InputGradientProblem("cpu", "float32", spec, 4, 24, 256)
    assert dispatch.select(problem).name == name


def test_autocast_does_not_lower_it():
    scheme, tensors = stored("vq-4", 24, 256)
    grad = torch.randn(200, 24)
    given = (grad, *flat(tensors), scheme.spec(), 256)
    plain = torch.ops.hf_vq.input_gradient(*given)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(torch.ops.hf_vq.input_gradient(*given), plain)


def test_a_bias_is_rounded_with_the_product():
    """Of many tokens: the product is float32, and the sum is rounded once."""
    scheme, tensors = stored("vq-4", 24, 256)
    weight, bias = StoredWeight.of(tensors, scheme, 256), torch.randn(24)
    x = torch.randn(200, 256).half()
    found = ops.linear(x, tensors, bias, scheme)
    exact = x.double() @ reference.decode(weight).double().T + bias.double()
    step = exact.abs().log2().floor().exp2() * 2.0**-10
    assert ((found.double() - exact).abs() <= 0.51 * step).float().mean() > 0.99
