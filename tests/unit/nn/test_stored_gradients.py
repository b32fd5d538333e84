"""Gradients of scales and codebooks, against float64 autograd of the reference."""

import pytest
import torch

from hf_vq import ops
from hf_vq.fit import fit_weight, fixed_tensors
from hf_vq.formats import WEIGHT_SCHEMES, qoq, weight_scheme
from hf_vq.formats.catalog import QOQ_SCHEMES
from hf_vq.formats.stored_weight import StoredWeight
from hf_vq.nn.trained import moved
from hf_vq.ops.reference import codes as reference
from hf_vq.ops.stored_gradients import weight_gradient

OUT, IN = 24, 256
FLOATS = ("scale", "scale_2", "codebook", "codebook_2")


def learned(scheme, tensors):
    """Keys that may train: floats of this weight alone, and the codebook that it was given."""
    return [key for key in FLOATS if key in tensors and tensors[key].is_floating_point()]


def in_float64(monkeypatch, decode, tensors, keys, grad_weight):
    """Gradients by autograd of `decode`, whose float32 is float64 for the while."""
    leaves = {key: tensors[key].double().requires_grad_() for key in keys}
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "float", torch.Tensor.double)
        weight = decode({**tensors, **leaves})
        assert weight.dtype == torch.float64
    return torch.autograd.grad(weight, list(leaves.values()), grad_weight, materialize_grads=True)


def assert_close(found, exact):
    """To the rounding of sums in float32."""
    assert found.dtype == torch.float32
    assert (found - exact).norm() <= 1e-5 * exact.norm()


@pytest.mark.parametrize("name", WEIGHT_SCHEMES)
def test_every_scheme(monkeypatch, name):
    scheme = weight_scheme(name)
    fitted = fit_weight(torch.randn(OUT, IN), scheme).tensors
    tensors = {**fixed_tensors(scheme, IN, 0), **fitted}
    keys = learned(scheme, tensors)
    x, grad = torch.randn(3, 5, IN, requires_grad=True), torch.randn(3, 5, OUT)
    leaves = {key: tensors[key].float().requires_grad_() for key in keys}
    y = ops.linear(x, {**tensors, **leaves}, None, scheme)
    grad_x, *found = torch.autograd.grad(y, [x, *leaves.values()], grad)
    grad_weight = torch.einsum("abo,abi->oi", grad.double(), x.detach().double())

    def decode(stored):
        return reference.decode(StoredWeight.of(stored, scheme, IN))

    exact = in_float64(monkeypatch, decode, tensors, keys, grad_weight)
    for one, other in zip(found, exact, strict=True):
        assert_close(one, other)
    assert_close(grad_x, grad.double() @ ops.decode_weight(tensors, scheme, IN).double())


@pytest.mark.parametrize("name", QOQ_SCHEMES)
def test_scales_of_qoq(monkeypatch, name):
    scheme = QOQ_SCHEMES[name]
    tensors = fit_weight(torch.randn(OUT, IN), scheme).tensors
    x, grad = torch.randn(7, IN), torch.randn(7, OUT)
    scale = tensors["scale"].float().requires_grad_()
    ops.w4a8_linear(x, {**tensors, "scale": scale}, None, scheme.spec()).backward(grad)

    def decode(stored):
        return qoq.decode(stored, scheme, IN)

    grad_weight = grad.double().T @ x.double()
    exact = in_float64(monkeypatch, decode, tensors, ["scale"], grad_weight)
    assert_close(scale.grad, exact[0])


@pytest.mark.parametrize("name", ["vq-4", "gptvq-2"])
def test_compiled(name):
    """A compiler sees an op in the backward pass, too, and what it makes has the same gradients."""
    scheme = weight_scheme(name)
    tensors = {**fixed_tensors(scheme, IN, 0), **fit_weight(torch.randn(OUT, IN), scheme).tensors}
    leaves = {key: tensors[key].float().requires_grad_() for key in learned(scheme, tensors)}
    x, grad = torch.randn(3, IN), torch.randn(3, OUT)

    def product(x, leaves):
        return ops.linear(x, {**tensors, **leaves}, None, scheme)

    exact = torch.autograd.grad(product(x, leaves), list(leaves.values()), grad)
    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(x, leaves), list(leaves.values()), grad)
    assert all(torch.equal(one, other) for one, other in zip(found, exact, strict=True))


def test_a_single_row():
    grad, x = torch.randn(OUT), torch.randn(IN)
    assert torch.equal(weight_gradient(grad, x), torch.outer(grad, x))


def test_a_moved_tensor_stays_within_fp16():
    stored = torch.tensor([[1.0, 40000.0, -40000.0]]).half()
    found = moved(stored, torch.full((1, 3), 3.0), "scale")
    most = torch.finfo(torch.float16).max
    assert found.tolist() == [[4.0, most, -most]]
