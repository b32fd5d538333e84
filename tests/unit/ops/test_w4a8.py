"""`hf_vq::w4a8_linear`: sums of integers, one rounding after another, and every kernel the same."""

import numpy
import pytest
import torch

from hf_vq import dispatch, ops
from hf_vq.formats import QoQScheme, linear_scheme, unpack_bits
from hf_vq.formats.qoq import decode, encode
from hf_vq.formats.stored_weight import W4A8Weight
from hf_vq.ops import w4a8
from hf_vq.ops.library import linear_problem

SCHEMES = ["qoq-w4a8", "qoq-w4a8-g128", "qoq-w4a8-g32"]
SIZES = [(1, 32), (3, 96), (37, 704), (16, 1280)]


def layer(name: str, rows: int, columns: int) -> dict[str, torch.Tensor]:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns))
    return encode(weight, linear_scheme(name))


def in_whole_numbers(x, tensors, bias, in_features):
    """The formula with integers of 64 bits and floats rounded one by one, by numpy."""
    x = x.float().numpy()
    largest = numpy.maximum(numpy.abs(x).max(-1, keepdims=True), numpy.float32(1e-30))
    numbers = numpy.rint(x * (numpy.float32(127) / largest)).astype(numpy.int64)
    size = largest * (numpy.float32(1) / numpy.float32(127))
    codes = unpack_bits(tensors["codes"], 4, in_features).numpy().astype(numpy.int64)
    scale = tensors["scale"].double().numpy().T
    if "step" in tensors:
        step, zero = (tensors[key].numpy().astype(numpy.int64) for key in ("step", "zero"))
        group = numpy.arange(in_features) // (in_features // step.shape[1])
        codes = codes * step[:, group] - zero[:, group]
        assert codes.min() >= -128 and codes.max() <= 127
        y = (numbers @ codes.T) * scale
    else:
        zero = tensors["zero"].double().numpy().T
        y = (numbers @ codes.T) * scale - numbers.sum(-1, keepdims=True) * zero
    y = torch.from_numpy(y).float() * torch.from_numpy(size)
    return y if bias is None else y + bias.float()


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(("rows", "columns"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_reference_is_the_formula_in_whole_numbers(name, rows, columns, dtype) -> None:
    tensors, spec = layer(name, rows, columns), linear_scheme(name)
    x, bias = torch.randn(2, 3, columns).to(dtype), torch.randn(rows).to(dtype)
    for added in (bias, None):
        y = w4a8.reference(x, W4A8Weight.of(tensors, spec, columns), added)
        assert y.dtype == dtype and y.shape == (2, 3, rows)
        assert torch.equal(y, in_whole_numbers(x, tensors, added, columns).to(dtype))


@pytest.mark.parametrize("name", SCHEMES)
def test_it_is_the_product_of_what_both_stand_for(name) -> None:
    """Up to the rounding of floats: y is W x, for the x that 8 bits keep."""
    tensors, scheme = layer(name, 24, 1280), linear_scheme(name)
    x = torch.randn(7, 1280) * torch.logspace(-6, 6, 7)[:, None]
    numbers, size = w4a8.quantize_tokens(x)
    assert bool(((numbers * size - x).abs() <= 0.5001 * size).all())
    expected = (numbers.double() * size.double()) @ decode(tensors, scheme, 1280).double().T
    y = ops.w4a8_linear(x, tensors, None, name).double()
    assert bool(((y - expected).abs() <= 2**-22 * expected.abs() + 1e-9 * size).all())


def test_sums_of_inputs_beyond_fp16() -> None:
    """127 * 4096 is 520192: upstream keeps this sum in fp16."""
    tensors = layer("qoq-w4a8", 8, 4096)
    x = torch.full((1, 4096), 3.0)
    y = ops.w4a8_linear(x, tensors, None, "qoq-w4a8")
    expected = 3 * decode(tensors, QoQScheme(), 4096).double().sum(1)
    assert bool((y[0].double() - expected).abs().max() <= 2e-6 * expected.abs().max())


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("hostile", [torch.nan, torch.inf, -torch.inf])
def test_tokens_that_are_not_finite_give_nan_and_leave_others_alone(name, hostile) -> None:
    tensors = layer(name, 5, 704)
    x = torch.randn(4, 704)
    clean = ops.w4a8_linear(x, tensors, None, name)
    x[2, 700] = hostile
    y = ops.w4a8_linear(x, tensors, None, name)
    assert bool(y[2].isnan().all())
    assert torch.equal(y[[0, 1, 3]], clean[[0, 1, 3]])


@pytest.mark.parametrize("name", SCHEMES)
def test_zero_and_tiny_and_huge_tokens(name) -> None:
    tensors, bias = layer(name, 5, 704), torch.randn(5)
    x = torch.randn(1, 704)
    sizes = torch.tensor([0.0, 1e-45, 1e-38, 1e30, 3e38 / 8])[:, None]
    y = ops.w4a8_linear(x.sign() * sizes, tensors, None, name)
    assert bool((y[:3].abs() <= 1e-30 * 704).all()) and bool(y[:4].isfinite().all())
    unit = ops.w4a8_linear(x.sign(), tensors, None, name)
    torch.testing.assert_close(y[3:4] / 1e30, unit, rtol=1e-5, atol=0)
    zeros = ops.w4a8_linear(torch.zeros(2, 704), tensors, bias, name)
    assert torch.equal(zeros, bias.expand(2, -1))


@pytest.mark.parametrize("name", SCHEMES)
def test_schema_shapes_and_gradients(name) -> None:
    tensors, bias = layer(name, 6, 96), torch.randn(6, requires_grad=True)
    stored = [tensors[key] for key in ("codes", "scale", "zero")]
    arguments = (torch.randn(2, 3, 96, requires_grad=True), *stored, tensors.get("step"))
    torch.library.opcheck(torch.ops.hf_vq.w4a8_linear.default, (*arguments, bias, name))
    x = torch.randn(4, 96, requires_grad=True)
    ops.w4a8_linear(x, tensors, bias, name).square().sum().backward()
    y = ops.w4a8_linear(x.detach(), tensors, bias.detach(), name)
    weight = decode(tensors, linear_scheme(name), 96)
    torch.testing.assert_close(x.grad, 2 * y @ weight)
    torch.testing.assert_close(bias.grad, 2 * y.sum(0))
    assert ops.w4a8_linear(x[:0], tensors, None, name).shape == (0, 6)


@pytest.mark.parametrize("backend", ["", "reference"])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_vector_is_a_token(name, backend, monkeypatch) -> None:
    """[in] -> [out], whichever entry of the table runs it."""
    monkeypatch.setenv("HF_VQ_BACKEND", backend)
    tensors, x, bias = layer(name, 24, 1280), torch.randn(3, 1280), torch.randn(24)
    rows, one = (ops.w4a8_linear(part, tensors, bias, name) for part in (x, x[1]))
    assert one.shape == (24,) and torch.equal(one, rows[1])


def test_the_table_says_who_runs_it() -> None:
    x = torch.randn(1, 128)
    verdicts = dispatch.explain(linear_problem("w4a8_linear", x.double(), "qoq-w4a8", 8))
    assert [v.entry.name for v in verdicts if v.chosen] == ["reference"]
