"""Products with a decoded weight and their gradients, with the reference in the place of kernels:
which rows are decoded when, and what is rotated. tests/gpu/linear has the kernels."""

from contextlib import nullcontext

import pytest
import torch

from hf_vq.backends.cuda.linear import dequantize
from hf_vq.errors import VQFormatError
from hf_vq.formats import weight_scheme
from hf_vq.formats.stored_weight import StoredWeight, rotation_of
from hf_vq.ops.reference import codes as reference
from tests.fixtures.random_weights import random_tensors

OUT, IN = 600, 256


@pytest.fixture
def layer(request, monkeypatch):
    """A weight, and its rows decoded; the second parameter: kernels rotate rows back."""
    name, restored, at_a_time = request.param
    scheme = weight_scheme(name)
    tensors = random_tensors(scheme, OUT, IN)
    weight = StoredWeight.of(tensors, scheme, IN)
    rotated = reference.decode_rotated(
        tensors["codes"], tensors["codebook"], tensors["scale"], scheme, IN
    )
    rows = reference.rotate(rotated, rotation_of(tensors), scheme, True)

    def decode(stored, first, out):
        out.copy_(rotated[first : first + len(out)])

    def restore(stored, first, rotation, out, second=None):
        out.copy_(rows[first : first + len(out)])

    def rotate(x, rotation, scheme, out, inverse=False):
        out.copy_(reference.rotate(x.float(), rotation, scheme, inverse))

    monkeypatch.setattr(dequantize, "on_device", lambda ordinal: nullcontext())
    monkeypatch.setattr(dequantize, "restorable", lambda *_: None if restored else "no kernel")
    monkeypatch.setattr(dequantize, "_rotate", rotate)
    monkeypatch.setattr(dequantize.DeviceWeight, "decode", decode)
    monkeypatch.setattr(dequantize.DeviceWeight, "restore", restore)
    monkeypatch.setattr(dequantize.DeviceWeight, "rows_at_a_time", lambda *_: at_a_time)
    return weight, rows.double()


CASES = [(name, restored, at_a_time) for name in ("vq-4", "vq-4-scaled", "gptvq-2")
         for restored in (False, True) for at_a_time in (256, 300, 600, 4096)]  # fmt: skip


@pytest.mark.parametrize("layer", CASES, indirect=True)
@pytest.mark.parametrize("bias", [False, True])
def test_products(layer, bias):
    weight, rows = layer
    x, added = torch.randn(2, 5, IN), torch.randn(OUT) if bias else None
    found = dequantize.linear(x, weight, added)
    exact = x.double() @ rows.T + (0 if added is None else added)
    assert (found - exact).norm() <= 1e-5 * exact.norm()


@pytest.mark.parametrize("layer", CASES, indirect=True)
def test_gradients_of_inputs(layer):
    weight, rows = layer
    grad = torch.randn(2, 5, OUT)
    found = dequantize.input_gradient(grad, weight)
    exact = grad.double() @ rows
    assert found.shape == (2, 5, IN) and (found - exact).norm() <= 1e-5 * exact.norm()
    none = dequantize.input_gradient(grad[:, :0], weight)
    assert none.shape == (2, 0, IN)


@pytest.mark.parametrize("layer", [("vq-4", True, 20)], indirect=True)
def test_parts_are_summed_in_float32(layer):
    weight, rows = layer
    grad = torch.randn(5, OUT).bfloat16()
    exact = grad.double() @ rows
    apart = dequantize.input_gradient(grad, weight).double() - exact
    assert apart.norm() <= 1.6 * ((grad @ rows.bfloat16()).double() - exact).norm()


@pytest.mark.parametrize("layer", [("vq-4", True, 600), ("vq-4", False, 600)], indirect=True)
def test_a_weight_on_another_device(layer):
    """A kernel would read an address of another memory."""
    weight, _ = layer
    for side, name in enumerate(("codes", "codebook", "scale", "signs")):
        moved = [
            tensor.to("meta") if i == side else tensor for i, tensor in enumerate(weight.first)
        ]
        other = weight._replace(first=type(weight.first)(*moved))
        for call in (
            lambda w: dequantize.linear(torch.randn(3, IN), w, None),
            lambda w: dequantize.input_gradient(torch.randn(3, OUT), w),
        ):
            with pytest.raises(VQFormatError, match=f"input is on cpu, but the {name} .* on meta"):
                call(other)


def test_the_codebook_of_nested_passes_on_another_device():
    scheme = weight_scheme("turboquant-2+2")
    weight = StoredWeight.of(random_tensors(scheme, OUT, IN), scheme, IN)
    moved = weight.residual._replace(codebook=weight.residual.codebook.to("meta"))
    with pytest.raises(VQFormatError, match=r"but the codebook .* on meta"):
        dequantize.linear(torch.randn(3, IN), weight._replace(residual=moved), None)
