"""The entry `cuda.input_gradient` against float64: dL/dx = dL/dy W of every scheme.

Fresh random codes, scales and gradients; results lie in memory full of NaN.
"""

import pytest
import torch

from hf_vq import dispatch, ops
from hf_vq.backends.cuda.linear import dequantize
from hf_vq.codegen.families.dequantize import decodable
from hf_vq.codegen.families.dequantize_rotated import restorable
from hf_vq.codegen.plan import Dtype
from hf_vq.formats import WEIGHT_SCHEMES, VQScheme, weight_scheme
from hf_vq.formats.stored_weight import flat
from tests.fixtures.cuda_layers import ODD, ROTATED_BACK, poison, stored

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CASES = [(scheme.spec(), 130, 1152) for scheme in WEIGHT_SCHEMES.values() if not decodable(scheme)]
NESTED = [
    (scheme.spec(), 130, 1152) for scheme in WEIGHT_SCHEMES.values() if scheme.stages == "nested"
]


def runs(grad, scheme, in_features):
    tokens = dispatch.bucket(grad[..., 0].numel())
    dtype = str(grad.dtype).removeprefix("torch.")
    asked = dispatch.InputGradientProblem(
        "cuda", dtype, scheme.spec(), tokens, grad.shape[-1], in_features
    )
    return dispatch.select(asked).name


def gradient(grad, tensors, scheme, in_features):
    poison()
    return torch.ops.hf_vq.input_gradient(grad, *flat(tensors), scheme.spec(), in_features)


def check(found, grad, tensors, scheme):
    """The error is at most twice that of PyTorch's product with the decoded weight, rounded, and
    what stages and rotations of rows in fp16 lose (`test_rows_that_are_rotated_back`)."""
    columns, dtype = found.shape[-1], grad.dtype
    rows = ops.decode_weight(tensors, scheme, columns)
    exact = grad.double() @ rows.double()
    same = grad @ rows.to(dtype)
    half = dtype in DTYPES[:2] and restorable(scheme, columns, Dtype(str(dtype)[6:])) is None
    eps = (half * 2.0**-11 * (scheme.streams + 3) + 2.0**-20) * exact.norm()
    assert found.dtype == dtype and found.shape == (*grad.shape[:-1], columns)
    assert (found.double() - exact).norm() <= 2 * (same.double() - exact).norm() + eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("spec", "rows", "columns"), [*CASES, *ODD, *ROTATED_BACK])
def test_product_with_the_decoded_weight(spec, rows, columns, dtype):
    scheme, tensors = stored(spec, rows, columns)
    grad = torch.randn(2, 9, rows, device="cuda").to(dtype)
    assert runs(grad, scheme, columns) == "cuda.input_gradient"
    found = gradient(grad, tensors, scheme, columns)
    check(found, grad, tensors, scheme)
    assert torch.equal(gradient(grad, tensors, scheme, columns), found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["vq-4", "gptvq-2", "turboquant-4-scaled"])
def test_rows_in_several_parts(name, dtype, monkeypatch):
    """Sixteen, summed in float32: sums of 16 bits would be more than twice as wrong as PyTorch's
    product. Rows in float32 stay rotated."""
    scheme, tensors = stored(weight_scheme(name).spec(), 4000, 512)
    monkeypatch.setattr(dequantize, "DECODED_BYTES", 1)
    grad = torch.randn(40, 4000, device="cuda").to(dtype)
    found = gradient(grad, tensors, scheme, 512)
    check(found, grad, tensors, scheme)
    rows = ops.decode_weight(tensors, scheme, 512)
    exact, same = grad.double() @ rows.double(), grad @ rows.to(dtype)
    if dtype != torch.float32:
        assert (found.double() - exact).norm() <= 2 * (same.double() - exact).norm()


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize(("spec", "rows", "columns"), NESTED)
def test_nested_passes(spec, rows, columns, dtype):
    scheme, tensors = stored(spec, rows, columns)
    grad = torch.randn(40, rows, device="cuda").to(dtype)
    check(gradient(grad, tensors, scheme, columns), grad, tensors, scheme)


@pytest.mark.parametrize(
    ("name", "dtype"), [("turboquant-4+4", torch.float32), ("vq-4", torch.float64)]
)
def test_what_no_kernel_supports_is_left_to_the_reference(name, dtype):
    scheme, tensors = stored(weight_scheme(name).spec(), 48, 256)
    grad = torch.randn(5, 48, device="cuda", dtype=dtype)
    assert runs(grad, scheme, 256) == "reference"
    check(gradient(grad, tensors, scheme, 256), grad, tensors, scheme)


@pytest.mark.parametrize("shape", [(24,), (0, 24), (3, 0, 24)])
def test_one_row_and_none(shape):
    scheme, tensors = stored(weight_scheme("vq-4").spec(), 24, 256)
    grad = torch.ones(shape, device="cuda", dtype=torch.bfloat16)
    found = gradient(grad, tensors, scheme, 256)
    assert found.shape == (*shape[:-1], 256) and bool(found.isfinite().all())


def test_gradients_at_odd_places():
    """Not contiguous, not aligned; codes with gaps between rows, a scale in float32."""
    scheme, tensors = stored(weight_scheme("vq-4").spec(), 64, 256)
    wide = torch.randn(9, 131, device="cuda", dtype=torch.bfloat16)
    gaps = torch.stack([tensors["codes"]] * 2, 1)[:, 0]
    other = {**tensors, "codes": gaps, "scale": tensors["scale"].float()}
    for grad in (
        wide[:, 1:65],
        wide[:, 2:130:2],
        wide[:, :64].flip(0),
        wide[:1, :64].expand(9, 64),
    ):
        check(gradient(grad, other, scheme, 256), grad, tensors, scheme)


def test_autocast_does_not_lower_it(monkeypatch):
    """In several parts, whose products autocast would make in bfloat16."""
    scheme, tensors = stored(weight_scheme("vq-4").spec(), 1000, 256)
    monkeypatch.setattr(dequantize, "DECODED_BYTES", 1)
    grad = torch.randn(200, 1000, device="cuda")
    plain = gradient(grad, tensors, scheme, 256)
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.equal(gradient(grad, tensors, scheme, 256), plain)


def test_a_scheme_of_no_rotation_in_a_graph():
    """Captured, with gradients that change between replays."""
    scheme, tensors = stored(VQScheme.parse("vq2x8r1-tensor-g32-none").spec(), 130, 1152)
    grad = torch.randn(33, 130, device="cuda", dtype=torch.bfloat16)
    gradient(grad, tensors, scheme, 1152)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.ops.hf_vq.input_gradient(grad, *flat(tensors), scheme.spec(), 1152)
    for _ in range(3):
        grad.copy_(torch.randn(33, 130, device="cuda"))
        graph.replay()
        check(found, grad, tensors, scheme)
