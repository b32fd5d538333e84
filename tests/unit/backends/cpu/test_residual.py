"""The entry `cpu.nested_linear` on every instruction set of this machine.

It rounds inputs to 8 bits per 128 of them, and entries of the table to 16: the error of a product
is at most half a step of each, times what it is multiplied with.
"""

import pytest
import torch

from hf_vq import dispatch, ops
from hf_vq.backends.cpu import library
from hf_vq.backends.cpu import residual as cpu_nested
from hf_vq.env import CPU_ISA
from hf_vq.formats import VQScheme, weight_scheme
from hf_vq.formats.stored_weight import StoredWeight, rotation_of
from hf_vq.ops.reference import codes as reference
from tests.fixtures.random_weights import random_tensors

pytestmark = pytest.mark.skipif(library.load() is None, reason=library.why_not())

NESTED = weight_scheme("turboquant-4+4")
PLAIN = VQScheme.parse("vq1x4+4r2-universal-g0-none-nested")
LEVELS = 255 * 127 + 127
EPS = torch.finfo(torch.float32).eps


@pytest.fixture(params=library.isas())
def isa(request):
    library.use_isa(request.param)
    yield request.param
    library.use_isa(CPU_ISA.get())


def problem(spec, tokens=1, rows=64, columns=256, dtype="bfloat16"):
    return dispatch.LinearProblem("cpu", dtype, spec, tokens, rows, columns)


@pytest.mark.parametrize(
    "scheme", [NESTED, NESTED.scaled(), PLAIN], ids=lambda scheme: scheme.spec()
)
@pytest.mark.parametrize(("rows", "columns"), [(1, 128), (7, 384), (130, 1024)])
@pytest.mark.parametrize("tokens", [1, 4])
@torch.no_grad()
def test_it_is_the_product(isa, scheme, rows, columns, tokens):
    tensors, bias = random_tensors(scheme, rows, columns), torch.randn(rows)
    x, weight = torch.randn(tokens, columns), StoredWeight.of(tensors, scheme, columns)
    y = cpu_nested.linear(x, weight, bias)
    exact = reference.decode(weight).double() @ x.double().T + bias[:, None]
    u = ops.rotate(x, rotation_of(tensors), scheme).double()  # what is rounded
    w = reference.decode_nested(
        *(tensors[key] for key in ("codes", "codes_2", "codebook_2", "scale")), scheme, columns
    ).double()
    step = u.unflatten(1, (-1, 128)).abs().amax(2).repeat_interleave(128, 1) / 254
    scale = tensors["scale"].double().repeat_interleave(columns // tensors["scale"].shape[1], 1)
    level = tensors["codebook_2"].abs().max().double() / LEVELS / 2
    allowed = w.abs() @ step.T + (scale.abs() * level) @ (u.abs() + step).T
    size = w.abs() @ u.abs().T
    assert ((y.T - exact).abs() <= 1.001 * allowed + 64 * EPS * size + EPS * exact.abs()).all()
    # Errors of inputs are even between plus and minus half a step: a third of its square.
    chance = (y.T - exact).square() / (w.square() @ (step.square() / 3).T)
    assert rows < 100 or 0.5 < chance.mean() < 2


@torch.no_grad()
def test_one_pass_of_two(isa):
    """Without the second codes it is the product of the first pass."""
    tensors = random_tensors(NESTED, 64, 256)
    weight = StoredWeight.of(tensors, NESTED, 256)._replace(residual=None)
    x = torch.randn(1, 256)
    one = NESTED.first_pass().spec()
    expected = torch.ops.hf_vq.linear.default(x, *weight.first, *[None] * 4, None, one)
    assert torch.equal(cpu_nested.linear(x, weight, None), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_layers_are_computed_by_it(isa, dtype):
    """Through the op, as a layer calls it; inputs that are views, and a bias of another dtype."""
    tensors, bias = random_tensors(NESTED, 96, 256), torch.randn(96).bfloat16()
    assert dispatch.select(problem(NESTED.spec(), 2, 96, 256, str(dtype)[6:])).name == (
        "cpu.nested_linear"
    )
    x = torch.randn(256, 2).to(dtype).T
    y = ops.linear(x, tensors, bias, NESTED)
    expected = reference.linear(x.float(), StoredWeight.of(tensors, NESTED, x.shape[-1]), bias)
    assert y.dtype == dtype and (y - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (problem(weight_scheme("turboquant-4+2").spec()), "not nested passes of 4 + 4"),
        (problem(weight_scheme("turboquant-8").spec()), "not nested passes of 4 + 4"),
        (problem(NESTED.spec(), tokens=128), "more than 64 tokens"),
        (problem(NESTED.spec(), columns=192), "no multiples of 128"),
        (problem("vq1x4+4r2-universal-g64-hadamard64-nested"), "no multiples of 128"),
        (problem("vq1x4+4r2-universal-g128-qr128-nested"), "QR"),
        (problem(NESTED.spec(), dtype="float64"), "float64"),
    ],
)
def test_what_it_leaves_to_others(asked, reason):
    assert reason in cpu_nested.supports(asked)
    assert dispatch.select(asked).name != "cpu.nested_linear"
