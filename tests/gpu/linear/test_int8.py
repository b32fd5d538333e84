"""int8 inputs and weights in the kernel for many tokens on a Hopper GPU, against their formula.

Fresh random codes, scales and inputs; outputs lie in memory full of NaN. For the whole file an H200
needs about a minute, most of it compiling.
"""

import itertools
import random

import pytest
import torch

from hf_vq import VQConfig, dispatch, ops, quantize_model
from hf_vq.backends.cuda.linear import fused as cuda_fused
from hf_vq.backends.cuda.linear import wgmma as cuda_wide
from hf_vq.codegen.families.linear import LinearProblem
from hf_vq.codegen.families.linear_wgmma import FEWEST_INT8_TOKENS, best
from hf_vq.codegen.jit.device import device_arch
from hf_vq.codegen.plan import Dtype
from hf_vq.formats import WEIGHT_SCHEMES, VQScheme
from hf_vq.formats.stored_weight import StoredWeight
from hf_vq.ops.library import linear_problem
from tests.buckets.linear import check_int8
from tests.fixtures.cuda_layers import poison, stored

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]

DTYPES = (torch.float16, torch.bfloat16)
NAMES = ("vq-4", "vq-3", "vq-2", "turboquant-1", "turboquant-3", "turboquant-4", "turboquant-8",
         "quip-sharp-2", "quip-sharp-4", "aqlm-2", "aqlm-2-int7")  # fmt: skip
ODD = [  # spec, out_features, in_features
    ("vq2x8r1-universal-g128-random_hadamard64", 31, 128),
    ("vq4x8r1-universal-g0-random_hadamard8", 257, 512),
    ("vq2x8r1-tensor-g256-hadamard16", 129, 1024),
    ("vq8x8r3-tensor-g128-none", 1, 384),
    ("vq1x4r2-tensor-g128-hadamard4", 200, 256),
    ("vq2x8r1-universal-g128-scaled_hadamard128", 333, 1152),
    ("vq8x16r1-e8p-g128-scaled_hadamard128", 333, 1152),
    ("vq2x8r1-universal-g128-random_hadamard128", 40, 32768),  # as many columns as a block rounds
]
CASES = [(WEIGHT_SCHEMES[name].spec(), 333, 1152) for name in NAMES] + ODD


def of_int8(spec, rows, columns):
    scheme, tensors = stored(spec, rows, columns)
    return scheme.with_activations(8), tensors


def runs(x, scheme, rows):
    return dispatch.select(linear_problem("linear", x, scheme.spec(), rows)).name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("spec", "rows", "columns"), CASES)
def test_every_scheme(spec, rows, columns, dtype):
    scheme, tensors = of_int8(spec, rows, columns)
    tensors["scale"][::3] *= -1  # of AQLM's checkpoints some are negative
    bias = torch.randn(rows, device="cuda", dtype=dtype)
    for tokens in (FEWEST_INT8_TOKENS, 127, 130, 517):
        x = torch.randn(tokens, columns, device="cuda", dtype=dtype)
        assert runs(x, scheme, rows) == "cuda.int8_linear"
        poison()
        check_int8(ops.linear(x, tensors, bias, scheme), x, tensors, bias, scheme)
    check_int8(ops.linear(x, tensors, None, scheme), x, tensors, None, scheme)
    few = torch.randn(64, columns, device="cuda", dtype=dtype)
    assert runs(few, scheme, rows) != "cuda.int8_linear"
    assert runs(x, scheme.with_activations(16), rows) != "cuda.int8_linear"


@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x80])
@pytest.mark.parametrize("name", NAMES)
def test_extreme_codes(name, byte):
    scheme, tensors = of_int8(WEIGHT_SCHEMES[name].spec(), 130, 1152)
    tensors["codes"].fill_(byte)
    x = torch.randn(70, 1152, device="cuda", dtype=torch.float16)
    y = ops.linear(x, tensors, None, scheme)
    check_int8(y, x, tensors, None, scheme)


# Plans that are chosen must not spill (tests/unit/codegen/jit/test_compiler.py), others may.
@pytest.mark.filterwarnings("ignore:.*spills .* bytes per thread:RuntimeWarning")
@pytest.mark.parametrize("rows", [129, 4096])
@pytest.mark.parametrize("tokens", [40, 200, 1000])
@pytest.mark.parametrize("name", ["vq-4", "quip-sharp-2", "aqlm-2"])
def test_every_kind_of_plan(name, tokens, rows):
    """Not only those that are chosen: a sample of all feasible ones, the same bits by each."""
    columns = 2048
    scheme, tensors = of_int8(WEIGHT_SCHEMES[name].spec(), rows, columns)
    x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(rows, device="cuda", dtype=torch.bfloat16)
    weight = StoredWeight.of(tensors, scheme, columns)
    problem = LinearProblem(scheme, tokens, rows, columns, Dtype.BFLOAT16, device_arch(0), 8)
    found = []
    for plan in random.Random(tokens + rows).sample(best(problem), 4):
        launch = cuda_wide.prepare(plan, scheme, rows, columns, tokens, x.dtype, 0)
        y = torch.full((tokens + 1, rows), float("nan"), device="cuda", dtype=x.dtype)
        poison()
        cuda_fused.run(x, (weight,), (bias,), (y[:tokens],), 0, launch)
        assert y[tokens:].isnan().all()
        check_int8(y[:tokens], x, tensors, bias, scheme)
        found.append(y[:tokens])
    for other in found[1:]:  # integers have the same sum in every order
        assert torch.equal(found[0], other)


def test_many_tokens():
    """More than a decoded weight would be used for; rings and barriers go around many times."""
    scheme, tensors = of_int8(WEIGHT_SCHEMES["vq-4"].spec(), 14336, 4096)
    x = torch.randn(3001, 4096, device="cuda", dtype=torch.bfloat16)
    assert runs(x, scheme, 14336) == "cuda.int8_linear"
    poison()
    y = ops.linear(x, tensors, None, scheme)
    check_int8(y, x, tensors, None, scheme)
    assert torch.equal(ops.linear(x, tensors, None, scheme), y)


def test_a_token_has_its_own_scale():
    """Another token's size changes nothing, one that is not finite gives NaN, and zeros zero."""
    scheme, tensors = of_int8(WEIGHT_SCHEMES["vq-4"].spec(), 333, 1152)
    bias = torch.randn(333, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(100, 1152, device="cuda", dtype=torch.bfloat16)
    usual = ops.linear(x, tensors, bias, scheme)
    x[3] *= 1e4
    x[5, 700] = float("nan")
    x[70, 1] = float("-inf")
    x[99] = 0
    y = ops.linear(x, tensors, bias, scheme)
    others = [m for m in range(100) if m not in (3, 5, 70, 99)]
    assert torch.equal(y[others], usual[others])
    assert y[[5, 70]].isnan().all() and torch.equal(y[99], bias)
    check_int8(y[3:4].repeat(2, 1), x[3:4].repeat(2, 1), tensors, bias, scheme)


def test_rows_of_zeros_and_scales_that_are_not_finite():
    scheme, tensors = of_int8(WEIGHT_SCHEMES["vq-4"].spec(), 130, 1152)
    tensors["scale"][7] = 0
    tensors["scale"][8, 3:] = 0
    tensors["scale"][64, 2] = float("nan")
    tensors["scale"][65, 1] = float("inf")
    x = torch.randn(100, 1152, device="cuda", dtype=torch.float16)
    y = ops.linear(x, tensors, None, scheme)
    assert not y[:, 7].any()
    assert not y[:, [64, 65]].isfinite().any()
    kept = [row for row in range(130) if row not in (7, 64, 65)]
    some = {key: t[kept] if key in ("codes", "scale") else t for key, t in tensors.items()}
    check_int8(y[:, kept], x, some, None, scheme)


def test_weights_and_inputs_that_were_just_written():
    """A kernel begins before the one before it has ended."""
    spec = WEIGHT_SCHEMES["vq-4"].spec()
    scheme, tensors = of_int8(spec, 1024, 1024)
    others = [of_int8(spec, 1024, 1024)[1] for _ in range(4)]
    x = torch.randn(128, 1024, device="cuda", dtype=torch.bfloat16)
    exact = [ops.linear(x, other, None, scheme) for other in others]
    for turn in range(20):
        for key in ("codes", "scale", "signs"):
            tensors[key].copy_(others[turn % 4][key])
        y = ops.linear(x, tensors, None, scheme)
        assert torch.equal(y, exact[turn % 4])
        assert torch.equal(ops.linear(x, tensors, None, scheme), y)
    ahead = [x]
    for _ in range(6):
        ahead.append(ops.linear(ahead[-1], tensors, None, scheme))
    for given, found in itertools.pairwise(ahead):
        torch.cuda.synchronize()
        assert torch.equal(ops.linear(given, tensors, None, scheme), found)


@pytest.mark.parametrize("size", [1e-4, 1e-3, 1e3])
def test_entries_of_any_size(size):
    """Scales and codebooks may have divided the size of a weight between them in any way."""
    scheme, tensors = of_int8("vq2x8r1-tensor-g128-none", 130, 1152)
    plain = ops.linear(x := torch.randn(80, 1152, device="cuda").half(), tensors, None, scheme)
    tensors["codebook"] *= size
    tensors["scale"] = (tensors["scale"].float() / size).half()
    y = ops.linear(x, tensors, None, scheme)
    check_int8(y, x, tensors, None, scheme)
    assert (y - plain).norm() <= (0.01 if size > 1e-2 else 0.3) * plain.norm()


@pytest.mark.parametrize("stages", ["rerotated", "shared"])
def test_both_passes(stages):
    """Each is a product of int8."""
    spec = f"vq1x4r2-universal-g128-random_hadamard128-{stages}"
    scheme, tensors = of_int8(spec, 333, 1152)
    x = torch.randn(130, 1152, device="cuda", dtype=torch.bfloat16)
    y = ops.linear(x, tensors, None, scheme)
    floats = ops.linear(x, tensors, None, scheme.with_activations(16))
    assert not torch.equal(y, floats)
    assert (y - floats).float().norm() <= 0.03 * floats.float().norm()


def test_inputs_that_lie_anywhere():
    scheme, tensors = of_int8(WEIGHT_SCHEMES["vq-4"].spec(), 333, 1152)
    memory = torch.randn(100, 2400, device="cuda", dtype=torch.bfloat16)
    usual = ops.linear(memory[:, 1:1153].contiguous(), tensors, None, scheme)
    assert torch.equal(ops.linear(memory[:, 1:1153], tensors, None, scheme), usual)
    turned = memory[:, 1:1153].T.contiguous().T
    assert torch.equal(ops.linear(turned, tensors, None, scheme), usual)


def test_several_streams():
    scheme, tensors = of_int8(WEIGHT_SCHEMES["vq-4"].spec(), 2048, 1024)
    xs = [torch.randn(70 + 40 * i, 1024, device="cuda", dtype=torch.bfloat16) for i in range(4)]
    exact = [ops.linear(x, tensors, None, scheme) for x in xs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in xs]
    for _ in range(20):
        found = []
        for x, stream in zip(xs, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(ops.linear(x, tensors, None, scheme))
        torch.cuda.synchronize()
        assert all(map(torch.equal, found, exact))


def test_gradients_are_those_of_floats():
    scheme, tensors = of_int8(WEIGHT_SCHEMES["vq-4"].spec(), 256, 512)
    x = torch.randn(100, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(100, 256, device="cuda", dtype=torch.bfloat16)
    (found,) = torch.autograd.grad(ops.linear(x, tensors, None, scheme), x, grad)
    plain = scheme.with_activations(16)
    (exact,) = torch.autograd.grad(ops.linear(x, tensors, None, plain), x, grad)
    assert torch.equal(found, exact)


def test_in_a_cuda_graph():
    scheme, tensors = of_int8(WEIGHT_SCHEMES["vq-4"].spec(), 512, 1024)
    x = torch.randn(200, 1024, device="cuda", dtype=torch.bfloat16)
    ops.linear(x, tensors, None, scheme)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.linear(x, tensors, None, scheme)
    x.normal_()
    tensors["scale"].mul_(1.5)
    graph.replay()
    assert torch.equal(y, ops.linear(x, tensors, None, scheme))


def test_a_model():
    """The option reaches the kernel, eager and compiled, and can be taken back."""
    layers = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.Linear(1024, 256))
    model = quantize_model(
        layers.to("cuda", torch.bfloat16), VQConfig(activations=None, activations_bits=8)
    )
    x = torch.randn(300, 512, device="cuda", dtype=torch.bfloat16)
    scheme = VQScheme.parse(model[0].spec)
    assert scheme.activations_bits == 8 and runs(x, scheme, 1024) == "cuda.int8_linear"
    check_int8(model[0](x), x, model[0].tensors(), model[0].bias, scheme)
    found = model(x)
    compiled = torch.compile(model)(x)
    assert (compiled - found).float().norm() <= 0.01 * found.float().norm()
    for layer in model:
        layer.set_activations_bits(16)
    floats = model(x)
    assert not torch.equal(floats, found)
    assert (floats - found).float().norm() <= 0.05 * floats.float().norm()
