"""The fused kernel for codebooks of tiles on a GPU, against float64: every kind of plan, odd sizes.

Fresh random codes, codebooks, scales and inputs; outputs lie in memory full of NaN. For the whole
file an H200 needs less than a minute, most of it compiling.
"""

import itertools
import random

import pytest
import torch

from hf_vq import dispatch, ops
from hf_vq.backends.cuda.linear import fused as cuda_fused
from hf_vq.backends.cuda.linear import tile_codebook as cuda_tiles
from hf_vq.codegen.families.linear import LinearProblem, token_bucket
from hf_vq.codegen.families.linear_tile_codebook import best
from hf_vq.codegen.jit.device import device_arch
from hf_vq.codegen.plan import Dtype
from hf_vq.formats import weight_scheme
from hf_vq.formats.stored_weight import StoredWeight
from hf_vq.ops.library import linear_problem
from tests.fixtures.cuda_layers import check, poison, stored

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = {torch.float16: Dtype.FLOAT16, torch.bfloat16: Dtype.BFLOAT16}
TOKENS = (1, 2, 7, 8, 16, 33, 64, 100)
GPTVQ = weight_scheme("gptvq-2").spec()
CASES = [  # spec, out_features, in_features
    (GPTVQ, 333, 1152),  # neither whole rows of tiles nor whole columns
    (GPTVQ, 512, 512),
    (GPTVQ, 1, 256),
    (GPTVQ, 1026, 2048),  # words of y hold two rows, but not four
    (GPTVQ, 300, 64),  # a part of a tile
    ("vq2x8r1-tile128x128-g0-none", 130, 320),
    ("vq8x8r1-tile256x256-g0-none", 257, 768),
    ("vq16x8r1-tile256x512-g0-none", 140, 1024),
    ("vq4x4r1-tile64x128-g0-none", 129, 256),
    ("vq4x8r1-tile256x256-g0-random_hadamard128", 200, 1024),
    ("vq4x8r1-tile256x256-g0-hadamard0", 77, 256),
    ("vq4x8r1-tile256x256-g0-scaled_hadamard128", 200, 1024),
]


def multiplied(plan, x, tensors, bias, scheme, rows):
    """The product by a plan, and nothing beyond its last token."""
    tokens, columns = x.shape
    launch = cuda_tiles.prepare(plan, scheme, rows, columns, x.dtype, 0)
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
    for tokens in TOKENS:
        x = torch.randn(tokens, columns, device="cuda", dtype=dtype)
        asked = linear_problem("linear", x, scheme.spec(), rows)
        assert dispatch.select(asked).name == "cuda.tile_linear", dispatch.explain(asked)
        poison()
        check(ops.linear(x, tensors, bias, scheme), x, tensors, bias, scheme)
    check(ops.linear(x, tensors, None, scheme), x, tensors, None, scheme)


@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x80])
def test_extreme_codes(byte):
    scheme, tensors = stored(GPTVQ, 130, 1152)
    tensors["codes"].fill_(byte)
    for tokens in (1, 7, 40):
        x = torch.randn(tokens, 1152, device="cuda", dtype=torch.float16)
        check(ops.linear(x, tensors, None, scheme), x, tensors, None, scheme)


@pytest.mark.parametrize(("rows", "columns"), [(700, 1152), (4096, 4096)])
@pytest.mark.parametrize("tokens", [1, 8, 13, 32, 64])
def test_every_kind_of_plan(tokens, rows, columns):
    """Not only those that are chosen: a sample of all feasible ones, each twice."""
    scheme, tensors = stored(GPTVQ, rows, columns)
    x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(rows, device="cuda", dtype=torch.bfloat16)
    bucket = token_bucket(tokens)
    plans = best(LinearProblem(scheme, bucket, rows, columns, DTYPES[x.dtype], device_arch(0)))
    for plan in random.Random(tokens + rows).sample(plans, min(6, len(plans))):
        y = multiplied(plan, x, tensors, bias, scheme, rows)
        check(y, x, tensors, bias, scheme)
        # Where columns are split, sums do not depend on which block comes first.
        assert torch.equal(multiplied(plan, x, tensors, bias, scheme, rows), y)


def test_weights_that_were_just_written():
    """A kernel begins before the one before it has ended, and must not read old codes."""
    scheme, tensors = stored(GPTVQ, 4096, 4096)
    others = [stored(GPTVQ, 4096, 4096)[1] for _ in range(4)]
    x = torch.randn(1, 4096, device="cuda", dtype=torch.float16)
    exact = [ops.linear(x, other, None, scheme) for other in others]
    for turn in range(40):
        for key in ("codes", "scale", "codebook"):
            tensors[key].copy_(others[turn % 4][key])
        y = ops.linear(x, tensors, None, scheme)
        again = ops.linear(x, tensors, None, scheme)
        assert torch.equal(y, exact[turn % 4]) and torch.equal(again, y)


@pytest.mark.parametrize("tokens", [1, 16])
def test_inputs_that_were_just_written(tokens):
    """Launches in a row, each with the output of the one before."""
    scheme, tensors = stored(GPTVQ, 1024, 1024)
    x = torch.randn(tokens, 1024, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    ahead = [x]
    for _ in range(6):
        ahead.append(ops.linear(ahead[-1], tensors, None, scheme))
    for given, found in itertools.pairwise(ahead):
        torch.cuda.synchronize()
        assert torch.equal(ops.linear(given, tensors, None, scheme), found)


def test_in_a_graph():
    scheme, tensors = stored(GPTVQ, 512, 1024)
    x = torch.randn(16, 1024, device="cuda", dtype=torch.bfloat16)
    exact = ops.linear(x, tensors, None, scheme)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.linear(x, tensors, None, scheme)
    y.fill_(float("nan"))
    graph.replay()
    assert torch.equal(y, exact)


def test_inputs_at_odd_places():
    """Not contiguous, not aligned; a layer that dispatch decodes as soon as there are more."""
    scheme, tensors = stored(GPTVQ, 300, 512)
    wide = torch.randn(9, 1027, device="cuda", dtype=torch.float16)
    for x in (wide[:, 1:513], wide[:, 2:1026:2], wide[::2, 3:515]):
        check(ops.linear(x, tensors, None, scheme), x, tensors, None, scheme)
    many = torch.empty(129, 512, device="cuda", dtype=torch.float16)
    assert dispatch.select(linear_problem("linear", many, GPTVQ, 300)).name == "cuda.linear"
