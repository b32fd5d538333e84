"""Weights behind a diagonal: what is stored, what it computes, and what it is for."""

import math

import pytest
import torch

from hf_vq import ops
from hf_vq.errors import VQCalibrationError, VQFormatError
from hf_vq.fit import fit_weight, fixed_tensors
from hf_vq.fit.ldlq import Feedback
from hf_vq.formats import VQScheme, linear_scheme, tensor_specs, weight_scheme
from hf_vq.formats.packing import unpack_bits
from hf_vq.formats.spec import validate_tensor
from hf_vq.formats.stored_weight import rotation_of
from hf_vq.transforms import draw_signs, rotate, signed_diagonal
from tests.fixtures.random_weights import (
    REROTATED,
    SCALED_SCHEMES,
    SHARED,
    fit,
    input_scale,
    with_diagonal,
)

pytestmark = pytest.mark.usefixtures("reference_kernels")
ALL = [*SCALED_SCHEMES, REROTATED, SHARED]
QUICK = [name for name in ALL if "quip" not in name and not name.startswith("turboquant-8")]
LEARNED = "vq4x5r1-tensor-g64-scaled_hadamard64"


def everything(fitted, scheme, in_features):
    return {**fixed_tensors(scheme, in_features, 0), **fitted.tensors}


@pytest.mark.parametrize("name", [*ALL, LEARNED])
def test_what_is_stored(name):
    scheme, s = weight_scheme(name), input_scale(256)
    weight = torch.randn(16, 256) * 0.02
    fitted = fit_weight(weight, scheme, input_scale=s)
    specs = tensor_specs(scheme, 16, 256)
    assert set(fitted.tensors) == {key for key, spec in specs.items() if not spec.shared_name}
    for key, tensor in fitted.tensors.items():
        validate_tensor(key, tensor, specs[key], name)
    for key, seed in (("diagonal", 0), ("diagonal_2", 1)):
        if key in specs:
            diagonal = fitted.tensors[key].double()
            assert torch.equal(diagonal < 0, unpack_bits(draw_signs(256, seed), 1, 256) > 0)
            expected = (s.double().log().mean() - s.double().log()).exp()
            assert ((diagonal.abs() / expected - 1).abs() <= 2**-11).all()
    assert ("diagonal_2" in specs) == (scheme.stages == "rerotated")
    decoded = ops.decode_weight(everything(fitted, scheme, 256), scheme, 256)
    error = float((weight - decoded).square().sum() / weight.square().sum())
    assert fitted.relative_error == pytest.approx(error, rel=1e-4)


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("in_features", [256, 288, 48])
def test_linear_is_the_product_with_the_decoded_weight(name, in_features):
    """Up to the rounding of inputs that are divided and weights that are multiplied."""
    scheme = weight_scheme(name)
    tensors = everything(fit(torch.randn(24, in_features), scheme), scheme, in_features)
    weight = ops.decode_weight(tensors, scheme, in_features).double()
    x, bias = torch.randn(3, 5, in_features), torch.randn(24)
    exact = x.double() @ weight.T + bias
    y = ops.linear(x, tensors, bias, scheme)
    same = (x @ weight.float().T + bias).double()
    diagonal = tensors["diagonal"].double()
    eps = torch.finfo(torch.float32).eps * (x * diagonal).norm() * (weight / diagonal).norm()
    assert (y - exact).norm() <= 2 * (same - exact).norm() + eps


@pytest.mark.parametrize("name", ["vq-4-scaled", "turboquant-4+2-scaled", REROTATED, LEARNED])
def test_a_diagonal_of_signs_is_the_plain_scheme(name):
    """Bit for bit, if all inputs are equally large."""
    scheme, weight, x = weight_scheme(name), torch.randn(16, 256), torch.randn(3, 256)
    plain = scheme.unscaled()
    ones = fit_weight(weight, scheme, input_scale=torch.full((256,), 3.0))
    signs = fit_weight(weight, plain)
    expected = with_diagonal(signs.tensors, 256)
    assert ones.tensors.keys() == expected.keys()
    assert all(torch.equal(ones.tensors[key], expected[key]) for key in expected)
    tensors, before = everything(ones, scheme, 256), everything(signs, plain, 256)
    assert torch.equal(ops.linear(x, tensors, None, scheme), ops.linear(x, before, None, plain))
    decoded = ops.decode_weight(tensors, scheme, 256)
    assert torch.equal(decoded, ops.decode_weight(before, plain, 256))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rotated_weights_and_inputs_have_the_products_of_before(dtype):
    scheme = weight_scheme("vq-4-scaled")
    diagonal = signed_diagonal(input_scale(288), 0)
    weight, x = torch.randn(7, 288), torch.randn(5, 288).to(dtype)
    rows = ops.rotate_weight(weight, diagonal, scheme)
    turned = rotate(x, scheme, diagonal)
    assert turned.dtype == dtype
    exact = x.double() @ weight.double().T
    # A number of either is rounded to its dtype, and their rows have these lengths.
    bound = torch.finfo(dtype).eps * turned.double().norm(dim=-1)[:, None]
    eps = torch.finfo(torch.float32).eps * 16 * turned.double().norm(dim=-1)[:, None]
    length = rows.double().norm(dim=-1)
    assert ((turned.double() @ rows.double().T - exact).abs() <= (bound + eps) * length).all()
    back = rotate(rows, scheme, diagonal, inverse=True)
    assert torch.allclose(back, weight, atol=1e-5, rtol=1e-4)


def test_the_diagonal_stays_in_fp16():
    s = torch.logspace(-30, 30, 61, dtype=torch.float64)
    diagonal = signed_diagonal(s, 3)
    for numbers in (diagonal, 1 / diagonal.float()):
        least, most = numbers.half().abs().aminmax()
        assert least >= torch.finfo(torch.float16).tiny and most <= 2**14
    middle = slice(27, 34)
    assert torch.allclose(diagonal[middle].abs().double(), 1 / s[middle], rtol=2**-11)
    assert torch.equal(signed_diagonal(1e20 * s, 3), diagonal)


@pytest.mark.parametrize("name", ["vq-4", "turboquant-4"])
def test_large_inputs_are_read_with_less_error(name):
    """E |dy|^2 = sum_i h_i e_i of errors e_i of columns, h_i = E x_i^2. Rounding spreads the error
    evenly, e_i = c mean(w^2), and behind a diagonal e_i = c mean(w^2 s^2) / s_i^2. So
    s_i = sqrt(rms(x_i) / rms(w_i)) divides the cost by mean(h) mean(w^2) / mean(sqrt(h) |w|)^2.

    Errors are even where codes are fine enough: those of 2 bits follow the weights a little. The
    mean square of a column's errors varies by sqrt(2 / 1024) = 4 %, and about six columns are most
    of a cost, so that a ratio of two varies by 3 %, and the mean of four by 1.3 %."""
    plain = weight_scheme(name)
    h = torch.special.ndtri((torch.arange(128) + 0.5) / 128).mul(2).exp()
    gains, expected = [], []
    for _ in range(4):
        weight, costs = torch.randn(1024, 128), []
        w2 = weight.square().mean(0)
        expected.append((h.mean() * w2.mean()) / (h * w2).sqrt().mean().square())
        for scheme, options in (
            (plain, {}),
            (plain.scaled(), {"input_scale": (h / w2).sqrt().sqrt()}),
        ):
            fitted = fit_weight(weight, scheme, **options)
            wrong = weight - ops.decode_weight(everything(fitted, scheme, 128), scheme, 128)
            costs.append((wrong.square() * h).sum())
        gains.append(costs[0] / costs[1])
    gain, theory = (float(torch.stack(each).mean()) for each in (gains, expected))
    assert theory > 2.4 and gain == pytest.approx(theory, rel=0.05)


@pytest.mark.parametrize("name", ["vq-4-scaled", REROTATED, LEARNED])
def test_feedback_is_of_the_inputs_as_they_are_rotated(name):
    """With x' = (x d) H the moments are those of x', and errors cost what they cost the layer."""
    scheme, s = weight_scheme(name), input_scale(128)
    x = torch.randn(4096, 128) * torch.linspace(0.2, 2, 128) @ torch.randn(128, 128)
    moments = x.T @ x / len(x)
    rotation = rotation_of(fixed_tensors(scheme, 128, 0, input_scale=s))
    feedback = Feedback(moments, scheme, rotation)
    turned = rotate(x.double(), scheme, rotation)
    expected = turned.T @ turned / len(x)
    found = feedback.damped.double() - feedback.ridge * torch.eye(128)
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    weight = torch.randn(24, 128)
    plain = fit_weight(weight, scheme, input_scale=s)
    fitted = fit_weight(weight, scheme, input_scale=s, feedback=feedback)
    costs = []
    for one in (plain, fitted):
        wrong = weight - ops.decode_weight(everything(one, scheme, 128), scheme, 128)
        costs.append(float(((wrong @ moments) * wrong).sum() / ((weight @ moments) * weight).sum()))
    assert fitted.output_error == pytest.approx(costs[1], rel=1e-3)
    assert math.isnan(plain.output_error)
    assert costs[1] < 0.8 * costs[0]


@pytest.mark.parametrize(
    "wrong",
    [
        torch.ones(127),
        torch.ones(1, 128),
        torch.ones(128, dtype=torch.int32),
        torch.zeros(128),
        -torch.ones(128),
        torch.full((128,), math.inf),
        torch.full((128,), math.nan),
    ],
)
def test_a_wrong_scale_of_inputs(wrong):
    scheme = weight_scheme("vq-4-scaled")
    with pytest.raises(VQCalibrationError, match="q_proj: input_scale must be 128 positive"):
        fit_weight(torch.randn(4, 128), scheme, where="q_proj", input_scale=wrong)


@pytest.mark.parametrize("name", ["vq-4", "aqlm-2", "qoq-w4a8"])
def test_a_scale_of_inputs_that_nothing_stores(name):
    with pytest.raises(VQCalibrationError, match=r"q_proj: .* has no diagonal"):
        fit_weight(
            torch.randn(8, 128), linear_scheme(name), where="q_proj", input_scale=input_scale(128)
        )


@pytest.mark.parametrize("name", ["vq-4-scaled", REROTATED])
def test_a_scheme_that_lacks_its_scale_of_inputs(name):
    with pytest.raises(VQCalibrationError, match=r"q_proj: .* needs statistics of the layer's"):
        fit_weight(torch.randn(8, 128), weight_scheme(name), where="q_proj")


def test_weights_behind_a_diagonal_that_cannot_be_stored():
    """Whether weights are too small is seen where they are rounded: W itself may be quite wrong
    in columns that no input reads."""
    scheme = weight_scheme("turboquant-1-scaled")
    s = torch.ones(128)
    s[::2] = 100.0
    fitted = fit_weight(torch.randn(32, 128), scheme, input_scale=s)
    assert fitted.relative_error > 0.9
    for size in (1e-30, 1e-9):
        with pytest.raises(VQFormatError, match="q_proj has weights too small for fp16"):
            fit_weight(torch.randn(32, 128) * size, scheme, where="q_proj", input_scale=s)
    with pytest.raises(VQFormatError, match="q_proj has weights too large for fp16"):
        fit_weight(torch.randn(32, 128) * 1e6, scheme, where="q_proj", input_scale=s)


def test_chunks_do_not_change_the_result(monkeypatch):
    from hf_vq.fit import weight as module

    weight, s = torch.randn(37, 256), input_scale(256)
    for name in ("vq-4-scaled", REROTATED, SHARED):
        whole = fit_weight(weight, weight_scheme(name), input_scale=s)
        with monkeypatch.context() as patch:
            patch.setattr(module, "_CHUNK", 256 * 5)
            parts = fit_weight(weight, weight_scheme(name), input_scale=s)
        assert all(torch.equal(whole.tensors[key], parts.tensors[key]) for key in whole.tensors)


def test_there_is_nothing_to_scale_without_signs():
    for name in ("aqlm-2", "gptvq-2", "qoq-w4a8"):
        scheme = linear_scheme(name)
        assert scheme.scaled() is scheme is scheme.unscaled() and not scheme.is_scaled
    assert VQScheme(2, 8, rotation="hadamard").scaled().rotation == "hadamard"
