"""Products of 4-bit weights with 8-bit inputs on a GPU: the same numbers as the reference, bit by
bit. An error of one in a sum of integers would turn some of thousands of roundings.

Fresh random weights and inputs; memory that the allocator gives next is full of NaN.
"""

import itertools
import random

import pytest
import torch

from hf_vq import dispatch, ops
from hf_vq.backends.cuda import w4a8 as cuda_w4a8
from hf_vq.backends.cuda import w4a8_inputs
from hf_vq.codegen.families import w4a8 as choose_w4a8
from hf_vq.codegen.families import w4a8_wgmma as choose_w4a8_wide
from hf_vq.codegen.families.w4a8 import W4A8Problem
from hf_vq.codegen.jit.device import device_arch
from hf_vq.codegen.plan import Dtype
from hf_vq.formats import linear_scheme, pack_bits
from hf_vq.formats.qoq import encode
from hf_vq.formats.stored_weight import W4A8Weight
from hf_vq.ops import w4a8
from hf_vq.ops.library import linear_problem
from tests.fixtures.cuda_layers import natural, poison

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SCHEMES = ["qoq-w4a8", "qoq-w4a8-g128", "qoq-w4a8-g32", "qoq-w4a8-g64", "qoq-w4a8-g256"]
SIZES = [(37, 704), (130, 96), (1, 32), (333, 1152)]  # out_features, in_features
TOKENS = (1, 3, 9, 17, 130, 517)
DTYPES = (torch.float16, torch.bfloat16)
GROUPS = {"qoq-w4a8": 0, "qoq-w4a8-g128": 128}


def layer(name, rows, columns):
    weight = torch.randn(rows, columns, device="cuda")
    weight *= torch.rand(rows, 1, device="cuda") * 3
    return encode(weight, linear_scheme(name))


def inputs(tokens, columns, dtype):
    """Tokens of several sizes."""
    sizes = torch.logspace(-2, 2, tokens, device="cuda")[torch.randperm(tokens)]
    return (torch.randn(tokens, columns, device="cuda") * sizes[:, None]).to(dtype)


def exact(x, tensors, bias, name):
    return w4a8.reference(x, W4A8Weight.of(tensors, linear_scheme(name), x.shape[-1]), bias)


def row_of(x, name, rows):
    return dispatch.select(linear_problem("w4a8_linear", x, name, rows)).name


def on_hopper():
    return torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("columns", [32, 704, 4096, 14336])
def test_tokens_are_rounded_as_the_reference_does(columns, swizzled, dtype):
    kernel = w4a8_inputs.prepare(Dtype(str(dtype)[6:]), columns, swizzled, 0)
    tokens = 21
    x = inputs(tokens, columns, dtype)
    x[1] = 0
    x[2] = x[2].sign() * torch.finfo(dtype).tiny
    x[3] = torch.finfo(dtype).max
    x[4, -1], x[5, 0], x[6, 1] = torch.nan, torch.inf, -torch.inf
    poison()
    found = w4a8_inputs.rounded(kernel, x)
    ordered, size, sums = natural(found)
    expected, exact_size = w4a8.quantize_tokens(x)
    assert torch.equal(size.nan_to_num(-1), exact_size.nan_to_num(-1))
    assert torch.equal(sums, expected.sum(1, dtype=torch.int32))
    assert torch.equal(ordered[:, :columns], expected)
    assert not ordered[:, columns:].any()
    if not swizzled:  # what fills up the last eight tokens
        lanes = found.memory[: found.token_at].view(64 // 8, -1, 2, 8, 4, 16)
        assert not lanes[tokens // 8, :, :, tokens % 8 :].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_every_scheme(name, rows, columns, dtype):
    tensors = layer(name, rows, columns)
    bias = torch.randn(rows, device="cuda", dtype=dtype)
    for tokens in TOKENS:
        x = inputs(tokens, columns, dtype)
        many = "cuda.w4a8_wide" if on_hopper() and tokens > 16 else "cuda.w4a8_linear"
        assert row_of(x, name, rows) == many
        poison()
        y = ops.w4a8_linear(x, tensors, bias, name)
        assert torch.equal(y, exact(x, tensors, bias, name)), tokens
    assert torch.equal(ops.w4a8_linear(x, tensors, None, name), exact(x, tensors, None, name))


def by_plan(plan, x, tensors, bias, name):
    """The product by a plan that nobody chose, and nothing beyond its last token."""
    rows, tokens = len(tensors["codes"]), len(x)
    y = torch.full((tokens + 1, rows), float("nan"), device="cuda", dtype=x.dtype)
    poison()
    launch = cuda_w4a8.prepare(plan, x.shape[-1], 0)
    weight = W4A8Weight.of(tensors, linear_scheme(name), x.shape[-1])
    cuda_w4a8.run(launch, x, weight, bias, y[:tokens])
    assert y[tokens:].isnan().all()
    return y[:tokens]


# Plans that are chosen must not spill (tests/unit/codegen/families/test_w4a8.py), others may.
@pytest.mark.filterwarnings("ignore:.*spills .* bytes per thread:RuntimeWarning")
@pytest.mark.parametrize("tokens", [1, 8, 37, 203, 1000])
@pytest.mark.parametrize("name", list(GROUPS))
def test_every_kind_of_plan(name, tokens):
    """Not only those that are chosen: a sample of all feasible ones."""
    rows, columns = 1027, 2080
    group = linear_scheme(name).group and linear_scheme(name).group_of(columns)
    tensors, x = layer(name, rows, columns), inputs(tokens, columns, torch.bfloat16)
    bias = torch.randn(rows, device="cuda", dtype=torch.bfloat16)
    expected = exact(x, tensors, bias, name)
    asked = W4A8Problem(
        group, tokens, rows, columns, Dtype.BFLOAT16, Dtype.BFLOAT16, device_arch(0)
    )
    plans = random.Random(tokens).sample(choose_w4a8.best(asked), 4)
    if tokens > 1:
        wide = choose_w4a8_wide.best(asked)
        plans += random.Random(tokens).sample(wide, min(4, len(wide)))
    for plan in plans:
        assert torch.equal(by_plan(plan, x, tensors, bias, name), expected), plan


@pytest.mark.parametrize("tokens", [1, 16, 64, 2048])
@pytest.mark.parametrize("name", list(GROUPS))
def test_large_products(name, tokens):
    tensors, x = layer(name, 4096, 4096), inputs(tokens, 4096, torch.bfloat16)
    poison()
    y = ops.w4a8_linear(x, tensors, None, name)
    assert torch.equal(y, exact(x, tensors, None, name))


@pytest.mark.parametrize("tokens", [1, 8, 64])
@pytest.mark.parametrize("byte", [0x00, 0xFF, 0xF0])
def test_extreme_codes_and_inputs(byte, tokens):
    """The largest sums of a row of 14336: beyond 24 bits, so that floats could not hold them."""
    rows, columns = 40, 14336
    for name in GROUPS:
        tensors = layer(name, rows, columns)
        tensors["codes"].fill_(byte)
        if "step" in tensors:
            tensors["step"].fill_(15)
            tensors["zero"][::2] = 98
            tensors["zero"][1::2] = 127
        for x in (torch.ones(tokens, columns), -torch.ones(tokens, columns)):
            x = (x * torch.rand(tokens, 1).add(0.5)).cuda().half()
            assert torch.equal(
                ops.w4a8_linear(x, tensors, None, name), exact(x, tensors, None, name)
            )


@pytest.mark.parametrize("tokens", [1, 4, 40])
@pytest.mark.parametrize("name", list(GROUPS))
def test_tokens_that_are_not_finite(name, tokens):
    tensors, x = layer(name, 70, 704), inputs(tokens, 704, torch.float16)
    clean = ops.w4a8_linear(x, tensors, None, name)
    for hostile in (torch.nan, torch.inf, -torch.inf):
        x[-1, 700] = hostile
        y = ops.w4a8_linear(x, tensors, None, name)
        assert bool(y[-1].isnan().all()) and torch.equal(y[:-1], clean[:-1])


@pytest.mark.parametrize("tokens", [1, 3, 50])
@pytest.mark.parametrize("name", list(GROUPS))
def test_other_tensors(name, tokens):
    """Views, other dtypes of a bias, several dimensions, tensors that begin anywhere."""
    tensors = layer(name, 65, 256)
    wide = inputs(tokens, 2 * 256, torch.bfloat16)
    for x in (wide[:, ::2], wide[:, 3:259], wide[:, :256].view(1, tokens, 1, 256)):
        for dtype in (torch.float32, torch.float16, torch.float64):
            bias = torch.randn(66, device="cuda", dtype=dtype)[1:]
            y = ops.w4a8_linear(x, tensors, bias, name)
            assert y.shape == (*x.shape[:-1], 65)
            assert torch.equal(y, exact(x, tensors, bias, name))
    assert ops.w4a8_linear(x[:0], tensors, None, name).shape == (0, tokens, 1, 65)


def test_what_kernels_do_not_take_is_left_to_the_reference():
    name, x = "qoq-w4a8", torch.randn(2, 77, device="cuda", dtype=torch.float16)
    tensors = layer(name, 9, 77)
    assert row_of(x, name, 9) == "reference"
    verdicts = dispatch.explain(linear_problem("w4a8_linear", x, name, 9))
    assert any("does not divide 77" in verdict.reason for verdict in verdicts)
    assert torch.equal(ops.w4a8_linear(x, tensors, None, name), exact(x, tensors, None, name))
    assert row_of(x.float(), name, 9) == "reference"


@pytest.mark.parametrize("tokens", [1, 40])
def test_zeros_that_are_no_whole_scales(tokens):
    """As those of checkpoints of others, which are rounded to fp16."""
    name, x = "qoq-w4a8", inputs(tokens, 1024, torch.bfloat16)
    tensors = layer(name, 300, 1024)
    tensors["zero"][::2] = tensors["zero"][::2].half().float() * 1.01
    tensors["zero"][0], tensors["scale"][1], tensors["zero"][1] = -3e38, 0, 0
    bias = torch.randn(300, device="cuda")
    y = ops.w4a8_linear(x, tensors, bias, name)
    assert torch.equal(y, exact(x, tensors, bias, name))


@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("name", list(GROUPS))
def test_copies_that_take_the_place_of_others(name, tokens):
    """Tensors as new as those before them, at the same addresses, written just now."""
    x, layers = inputs(tokens, 2048, torch.bfloat16), [layer(name, 2048, 2048) for _ in range(3)]
    expected = [exact(x, tensors, None, name) for tensors in layers]
    for turn in range(15):
        fresh = {key: tensor.clone() for key, tensor in layers[turn % 3].items()}
        assert torch.equal(ops.w4a8_linear(x, fresh, None, name), expected[turn % 3])
        bias = torch.full((2048,), float(turn), device="cuda")
        for _ in range(2):
            y = ops.w4a8_linear(x, layers[0], bias.bfloat16(), name)
        assert torch.equal(y, exact(x, layers[0], bias.bfloat16(), name))


@pytest.mark.parametrize("tokens", [1, 16, 100])
@pytest.mark.parametrize("name", list(GROUPS))
def test_weights_and_inputs_that_were_just_written(name, tokens):
    """A kernel begins before the one before it has ended, and must not read old numbers."""
    tensors, others = layer(name, 1024, 1024), [layer(name, 1024, 1024) for _ in range(3)]
    x = inputs(tokens, 1024, torch.bfloat16)
    expected = [exact(x, other, None, name) for other in others]
    for turn in range(12):
        for key, tensor in tensors.items():
            tensor.copy_(others[turn % 3][key])
        y = ops.w4a8_linear(x, tensors, None, name)
        again = ops.w4a8_linear(x, tensors, None, name)
        assert torch.equal(y, expected[turn % 3]) and torch.equal(again, y)
    ahead = [x]
    for _ in range(6):
        ahead.append(ops.w4a8_linear(ahead[-1], tensors, None, name))
    for given, found in itertools.pairwise(ahead):
        torch.cuda.synchronize()
        assert torch.equal(exact(given, tensors, None, name), found)


@pytest.mark.parametrize("tokens", [1, 16, 96])
@pytest.mark.parametrize("name", list(GROUPS))
def test_in_a_graph_and_compiled(name, tokens):
    tensors, x = layer(name, 512, 1024), inputs(tokens, 1024, torch.bfloat16)
    ops.w4a8_linear(x, tensors, None, name)  # compiles, which no graph holds
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.w4a8_linear(x, tensors, None, name)
    y.fill_(float("nan"))
    other = inputs(tokens, 1024, torch.bfloat16)
    x.copy_(other)
    graph.replay()
    assert torch.equal(y, exact(other, tensors, None, name))
    if tokens == 16:
        compiled = torch.compile(lambda x: ops.w4a8_linear(x, tensors, None, name), fullgraph=True)
        assert torch.equal(compiled(other), y)


def test_hostile_tensors_are_refused():
    from hf_vq.errors import VQFormatError

    name, x = "qoq-w4a8-g128", torch.randn(2, 256, device="cuda", dtype=torch.float16)
    tensors = layer(name, 64, 256)
    for key in ("codes", "scale", "zero", "step"):
        for wrong in (tensors[key][:-1], tensors[key].cpu()):
            if key == "codes" and wrong.is_cuda:
                continue  # a layer of fewer rows, of which the others would be wrong
            with pytest.raises((VQFormatError, RuntimeError)):
                ops.w4a8_linear(x, {**tensors, key: wrong}, None, name)
    with pytest.raises(VQFormatError):
        ops.w4a8_linear(x, tensors, torch.zeros(63, device="cuda"), name)


def test_codes_are_those_of_the_format():
    """One weight at a time: every column is where the format says."""
    rows, columns = 16, 256
    tensors = layer("qoq-w4a8", rows, columns)
    x = torch.eye(columns, device="cuda", dtype=torch.float16)
    codes = torch.randint(16, (rows, columns), dtype=torch.uint8, device="cuda")
    tensors |= {"codes": pack_bits(codes, 4), "zero": torch.zeros_like(tensors["zero"])}
    tensors["scale"].fill_(1)
    found = [ops.w4a8_linear(part, tensors, None, "qoq-w4a8") for part in x.split(8)]
    found = torch.cat(found)
    assert torch.equal(found.T.round().to(torch.uint8), codes)
    assert torch.equal(ops.w4a8_linear(x, tensors, None, "qoq-w4a8"), found)
