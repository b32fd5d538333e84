"""Products with one input become one op in a compiled graph, and in no other."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from hf_vq import dispatch, patches
from hf_vq.formats import WEIGHT_SCHEMES, stored_weight, weight_scheme
from hf_vq.nn import VQLinear
from hf_vq.ops import horizontal_fusion
from hf_vq.ops.reference import codes as reference
from tests.fixtures.random_weights import random_tensors

SCHEME, SMALLER = WEIGHT_SCHEMES["vq-4"], WEIGHT_SCHEMES["vq-2"]
SLOTS = [patch.target.partition(":")[2] for patch in patches.TABLE if patch.fills]
LINEAR, LINEARS = torch.ops.hf_vq.linear.default, torch.ops.hf_vq.linears.default


@pytest.fixture
def launches():
    """Numbers of rows of every launch of several matrices; reference kernels on the CPU do it."""
    found = []

    def several(x, weights, biases):
        found.append([weight.out_features for weight in weights])
        return [reference.linear(x, *given) for given in zip(weights, biases, strict=True)]

    grouped = dispatch.Implementation(reference.linear, grouped=several)
    with dispatch.preferred(dispatch.Entry("test.linear", "linear", grouped, ("cpu",))):
        yield found


def weights(scheme=SCHEME, rows=(48, 16, 16), columns=256):
    """Tensors of matrices that share a codebook, as universal schemes do."""
    first = random_tensors(scheme, rows[0], columns)
    others = [random_tensors(scheme, n, columns) for n in rows[1:]]
    return [first, *({**tensors, "codebook": first["codebook"]} for tensors in others)]


def arguments(tensors, bias=None, scheme=SCHEME):
    return *stored_weight.flat(tensors), bias, scheme.spec()


def fused(run, x, *each):
    """Rows of each op that `fuse` leaves of `run(x, *each)`, in order; results are what they were.

    A tensor that several of `each` have is one input of the graph.
    """
    tensors = list({id(t): t for one in each for t in one.values()}.values())
    index = [{key: [t is u for u in tensors].index(True) for key, t in one.items()} for one in each]

    def flat(x, *given):
        return run(x, *({key: given[i] for key, i in one.items()} for one in index))

    module = make_fx(flat, tracing_mode="fake")(x, *tensors)
    expected = module(x, *tensors)
    horizontal_fusion.fuse(module.graph)
    module.graph.lint()
    module.recompile()
    for found, other in zip(module(x, *tensors), expected, strict=True):
        assert torch.equal(found, other)
    return [
        [node.meta["val"].shape[-1]] if node.target is LINEAR
        else [y.shape[-1] for y in node.meta["val"]]
        for node in module.graph.nodes if node.target in (LINEAR, LINEARS)
    ]  # fmt: skip


def test_what_shares_an_input_is_one_op(launches):
    def run(x, q, k, v, added):
        first = LINEAR(x, *arguments(q))
        second = LINEAR(x + 1, *arguments(q)) + first  # another input
        third = LINEAR(x, *arguments(k, added["bias"]))
        return first, second, third, LINEAR(x, *arguments(v))

    assert fused(run, torch.randn(2, 3, 256), *weights(), {"bias": torch.randn(16)}) == [
        [48, 16, 16], [48]
    ]  # fmt: skip
    assert launches == [[48, 16, 16]]


def test_an_input_that_was_one_of_them(launches):
    def run(x, a, b, c, d):
        first, second = (LINEAR(x, *arguments(one)) for one in (a, b))
        return second, LINEAR(first, *arguments(c)), LINEAR(first, *arguments(d))

    assert fused(run, torch.randn(2, 256), *weights(rows=(256,) * 4)) == [[256] * 2, [256] * 2]


def test_at_most_so_many(launches):
    def run(x, *each):
        return [LINEAR(x, *arguments(tensors)) for tensors in each]

    each = weights(rows=[16] * (horizontal_fusion.MOST + 3))
    assert fused(run, torch.randn(1, 256), *each) == [[16] * horizontal_fusion.MOST, [16] * 3]


def test_what_does_not_belong_together(launches):
    nested = weight_scheme("turboquant-4+4")

    def run(x, q, k, other, *two_passes):
        first = LINEAR(x, *arguments(q))
        late = k["scale"] * first.sum().half().clamp(0, 1)  # computed after the first
        return (
            first, LINEAR(x, *arguments(other, None, SMALLER)),
            LINEAR(x, *arguments({**k, "scale": late})),
            *(LINEAR(x, *arguments(tensors, None, nested)) for tensors in two_passes),
        )  # fmt: skip

    given = (*weights(rows=(48, 16)), *weights(SMALLER, (24,)), *weights(nested, (16, 16)))
    assert fused(run, torch.randn(1, 256), *given) == [[48], [24], [16], [16], [16]]
    assert not launches


@pytest.mark.usefixtures("reference_kernels")
def test_only_where_a_kernel_takes_several():
    def run(x, *each):
        return [LINEAR(x, *arguments(tensors)) for tensors in each]

    assert fused(run, torch.randn(1, 256), *weights()) == [[48], [16], [16]]


@pytest.mark.parametrize("rows", [(48, 16), (7, 33, 1)])
def test_the_op(rows):
    each = weights(rows=rows)
    x, bias = torch.randn(5, 256), [torch.randn(rows[0]), *[None] * (len(rows) - 1)]
    keys = ("codes", "codebook", "scale", "signs")
    given = (x, *([tensors[key] for tensors in each] for key in keys), bias, SCHEME.spec())
    for found, tensors, added in zip(LINEARS(*given), each, bias, strict=True):
        assert torch.equal(found, LINEAR(x, *arguments(tensors, added)))
    torch.library.opcheck(LINEARS, given)


class Attention(torch.nn.Module):
    """Three layers with one input, as a model has them."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (VQLinear(256, n, n == 48, SCHEME) for n in (48, 16, 16))
        for layer, tensors in zip((self.q, self.k, self.v), weights(), strict=True):
            for key, tensor in tensors.items():
                name = layer.attributes[key]
                held = layer._buffers if name in layer._buffers else layer._parameters
                held[name] = tensor if held is layer._buffers else torch.nn.Parameter(tensor, False)
        torch.nn.init.normal_(self.q.bias)

    def forward(self, x):
        return self.q(x).sigmoid() * torch.cat([self.k(x), self.v(x), self.k(x + 1)], -1)


@pytest.fixture
def config():
    """The compiler's configuration, in which nobody registered a pass."""
    from torch._inductor import config

    with config.patch({slot: None for slot in SLOTS}):
        yield config


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model(launches, config):
    """Without a change to the model, also where gradients are asked for."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        pytest.skip("inductor needs a C++ compiler")
    seen = []
    setattr(config, SLOTS[0], seen.append)  # a user's
    model, x = Attention(), torch.randn(2, 256)
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        expected = model(x)
        assert torch.allclose(compiled(x), expected, atol=1e-6)
    assert launches == [[48, 16, 16]] and len(seen) == 1
    assert getattr(config, SLOTS[1]) is horizontal_fusion.fusing_pass(None)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for run, given in zip((model, compiled), inputs, strict=True):
        run(given).square().sum().backward()
    assert torch.allclose(inputs[0].grad, inputs[1].grad, rtol=1e-4, atol=1e-4)
    assert launches == [[48, 16, 16]] * 2
    torch.compiler.reset()


def test_passes_of_others_stay(config):
    mine = [lambda graph: None, lambda graph: None]
    for slot, one in zip(SLOTS, mine, strict=True):
        setattr(config, slot, one)
    patches.apply(patches.TRACE)
    assert [getattr(config, slot) for slot in SLOTS] == mine
    setattr(config, SLOTS[0], None)
    for _ in range(2):
        patches.apply(patches.TRACE)
        assert getattr(config, SLOTS[0]) is horizontal_fusion.fusing_pass(None)
        assert getattr(config, SLOTS[1]) is mine[1]
