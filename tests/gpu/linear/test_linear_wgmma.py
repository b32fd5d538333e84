"""The fused kernel for many tokens on a Hopper GPU, against float64: every scheme, odd sizes.

Fresh random codes, scales and inputs; outputs lie in memory full of NaN. For the whole file an H200
needs about a minute, most of it compiling.
"""

import itertools
import random

import pytest
import torch

from hf_vq import dispatch, ops
from hf_vq.backends.cuda.linear import fused as cuda_fused
from hf_vq.backends.cuda.linear import wgmma as cuda_wide
from hf_vq.codegen.families.linear import LinearProblem
from hf_vq.codegen.families.linear_wgmma import best, fewest_tokens
from hf_vq.codegen.jit.device import device_arch
from hf_vq.codegen.plan import Dtype
from hf_vq.formats import WEIGHT_SCHEMES, weight_scheme
from hf_vq.formats.stored_weight import StoredWeight
from hf_vq.ops.library import linear_problem
from tests.fixtures.cuda_layers import check, poison, stored

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]

DTYPES = (torch.float16, torch.bfloat16)
NAMES = ("vq-4", "turboquant-4", "turboquant-8", "vq-3", "vq-2", "quip-sharp-2", "quip-sharp-4",
         "aqlm-2")  # fmt: skip
ODD = [  # spec, out_features, in_features
    ("vq2x8r1-universal-g64-random_hadamard64", 31, 192),  # chunks of 64 columns
    ("vq4x8r1-universal-g0-random_hadamard0", 257, 512),
    ("vq2x8r1-tensor-g256-hadamard1024", 129, 1024),
    ("vq8x8r3-tensor-g128-none", 1, 384),
    ("vq16x8r1-tensor-g0-none", 65, 256),
    ("vq1x2r2-tensor-g128-none", 200, 256),
    ("vq2x8r1-universal-g128-scaled_hadamard128", 333, 1152),
    ("vq2x8r1-universal-g64-scaled_hadamard64", 31, 192),
    ("vq8x16r1-e8p-g128-scaled_hadamard128", 333, 1152),
]
CASES = [(WEIGHT_SCHEMES[name].spec(), 333, 1152) for name in NAMES] + ODD


def multiplied(plan, x, tensors, bias, scheme, rows):
    """The product by a plan, and nothing beyond its last token."""
    tokens, columns = x.shape
    launch = cuda_wide.prepare(plan, scheme, rows, columns, tokens, x.dtype, 0)
    y = torch.full((tokens + 1, rows), float("nan"), device="cuda", dtype=x.dtype)
    poison()
    weight = StoredWeight.of(tensors, scheme, columns)
    cuda_fused.run(x, (weight,), (bias,), (y[:tokens],), 0, launch)
    assert y[tokens:].isnan().all()
    return y[:tokens]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("spec", "rows", "columns"), CASES)
def test_every_scheme(spec, rows, columns, dtype):
    scheme, tensors = stored(spec, rows, columns)
    bias = torch.randn(rows, device="cuda", dtype=dtype)
    for tokens in (fewest_tokens(scheme), 64, 127, 130, 517):
        x = torch.randn(tokens, columns, device="cuda", dtype=dtype)
        asked = linear_problem("linear", x, scheme.spec(), rows)
        assert dispatch.select(asked).name == "cuda.wide_linear", dispatch.explain(asked)
        poison()
        check(ops.linear(x, tensors, bias, scheme), x, tensors, bias, scheme)
    check(ops.linear(x, tensors, None, scheme), x, tensors, None, scheme)


@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x80])
@pytest.mark.parametrize("name", NAMES)
def test_extreme_codes(name, byte):
    scheme, tensors = stored(WEIGHT_SCHEMES[name].spec(), 130, 1152)
    tensors["codes"].fill_(byte)
    x = torch.randn(70, 1152, device="cuda", dtype=torch.float16)
    check(ops.linear(x, tensors, None, scheme), x, tensors, None, scheme)


# Plans that are chosen must not spill (tests/unit/codegen/jit/test_compiler.py), others may.
@pytest.mark.filterwarnings("ignore:.*spills .* bytes per thread:RuntimeWarning")
@pytest.mark.parametrize("rows", [129, 4096])
@pytest.mark.parametrize("tokens", [40, 200, 1000])
@pytest.mark.parametrize("name", ["vq-4", "quip-sharp-2", "aqlm-2"])
def test_every_kind_of_plan(name, tokens, rows):
    """Not only those that are chosen: a sample of all feasible ones, each twice."""
    columns = 2048
    scheme, tensors = stored(weight_scheme(name).spec(), rows, columns)
    x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(rows, device="cuda", dtype=torch.bfloat16)
    plans = best(LinearProblem(scheme, tokens, rows, columns, Dtype.BFLOAT16, device_arch(0)))
    for plan in random.Random(tokens + rows).sample(plans, 3):
        y = multiplied(plan, x, tensors, bias, scheme, rows)
        check(y, x, tensors, bias, scheme)
        # Where columns are split, sums do not depend on which block comes first.
        assert torch.equal(multiplied(plan, x, tensors, bias, scheme, rows), y)


def test_a_large_product():
    """More tiles than multiprocessors: rings and barriers go around many times."""
    scheme, tensors = stored(weight_scheme("vq-4").spec(), 14336, 4096)
    x = torch.randn(1000, 4096, device="cuda", dtype=torch.bfloat16)
    chosen = dispatch.select(linear_problem("linear", x, scheme.spec(), 14336))
    assert chosen.name == "cuda.wide_linear"
    poison()
    check(ops.linear(x, tensors, None, scheme), x, tensors, None, scheme)


def test_weights_that_were_just_written():
    """A kernel begins before the one before it has ended, and must not read old codes."""
    scheme, tensors = stored(weight_scheme("vq-4").spec(), 4096, 4096)
    others = [stored(weight_scheme("vq-4").spec(), 4096, 4096)[1] for _ in range(4)]
    x = torch.randn(128, 4096, device="cuda", dtype=torch.float16)
    exact = [ops.linear(x, other, None, scheme) for other in others]
    for turn in range(20):
        for key in ("codes", "scale", "signs"):
            tensors[key].copy_(others[turn % 4][key])
        y = ops.linear(x, tensors, None, scheme)
        again = ops.linear(x, tensors, None, scheme)
        assert torch.equal(y, exact[turn % 4]) and torch.equal(again, y)


def test_inputs_that_were_just_written():
    """Launches in a row, each with the output of the one before."""
    scheme, tensors = stored(weight_scheme("vq-4").spec(), 1024, 1024)
    x = torch.randn(100, 1024, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    ahead = [x]
    for _ in range(6):
        ahead.append(ops.linear(ahead[-1], tensors, None, scheme))
    for given, found in itertools.pairwise(ahead):
        torch.cuda.synchronize()
        assert torch.equal(ops.linear(given, tensors, None, scheme), found)


def test_in_a_graph():
    scheme, tensors = stored(weight_scheme("vq-2").spec(), 512, 1024)
    x = torch.randn(96, 1024, device="cuda", dtype=torch.bfloat16)
    exact = ops.linear(x, tensors, None, scheme)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.linear(x, tensors, None, scheme)
    y.fill_(float("nan"))
    graph.replay()
    assert torch.equal(y, exact)


def test_views_and_odd_places():
    """Experts' rows within one tensor, inputs that are not contiguous."""
    scheme, tensors = stored(weight_scheme("vq-4").spec(), 3 * 96, 512)
    x = torch.randn(50, 1024, device="cuda", dtype=torch.float16)[:, ::2]
    whole = ops.linear(x.contiguous(), tensors, None, scheme)
    for first in range(0, 288, 96):
        rows = slice(first, first + 96)
        expert = {**tensors, "codes": tensors["codes"][rows], "scale": tensors["scale"][rows]}
        assert torch.equal(ops.linear(x, expert, None, scheme), whole[:, rows])
