"""W4A8 layers with one input become one op in a compiled graph, which rounds that input once."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from hf_vq import dispatch
from hf_vq.formats import linear_scheme
from hf_vq.formats.qoq import encode
from hf_vq.formats.stored_weight import W4A8_KEYS
from hf_vq.ops import horizontal_fusion, w4a8
from hf_vq.ops.library import linear_problem

LINEAR, LINEARS = torch.ops.hf_vq.w4a8_linear.default, torch.ops.hf_vq.w4a8_linears.default
COLUMNS = 96


@pytest.fixture
def rounded(monkeypatch):
    """Shapes that the reference rounds."""
    monkeypatch.setenv("HF_VQ_BACKEND", "reference")
    shapes, plain = [], w4a8.quantize_tokens

    def counted(x):
        shapes.append(tuple(x.shape))
        return plain(x)

    monkeypatch.setattr(w4a8, "quantize_tokens", counted)
    known = dispatch.entries("w4a8_linear")[-1].implementation
    fused = known.fused._replace(tokens=counted)
    counting = dispatch.Implementation(w4a8.reference, fused=fused)
    with dispatch.using([dispatch.Entry("reference", "w4a8_linear", counting)]):
        yield shapes


def weight(name, rows):
    tensors = encode(torch.randn(rows, COLUMNS), linear_scheme(name))
    return tuple(tensors.get(key) for key in W4A8_KEYS)


def graph_of(run, *given):
    """The graph of `run` after the pass, compared with what it was."""
    module = make_fx(run, tracing_mode="fake")(*given)
    expected = module(*given)
    horizontal_fusion.fuse(module.graph)
    module.graph.lint()
    module.recompile()
    return module, expected


@pytest.mark.parametrize(("tokens", "once"), [(5, True), (1, False)])
@pytest.mark.parametrize("name", ["qoq-w4a8", "qoq-w4a8-g32"])
def test_an_input_is_rounded_once(name, tokens, once, rounded):
    q, k, v = (weight(name, rows) for rows in (48, 16, 16))
    x, bias = torch.randn(1, tokens, COLUMNS), torch.randn(48)

    def run(x, bias, q, k, v):
        first = LINEAR(x, *q, bias, name)
        other = LINEAR(x + 1, *q, None, name)
        return first, LINEAR(x, *k, None, name), LINEAR(x, *v, None, name), other

    module, expected = graph_of(run, x, bias, q, k, v)
    targets = [node.target for node in module.graph.nodes]
    assert targets.count(LINEARS) == once and targets.count(LINEAR) == (1 if once else 4)
    rounded.clear()
    found = module(x, bias, q, k, v)
    assert all(map(torch.equal, found, expected))
    assert len(rounded) == (2 if once else 4)


@pytest.mark.usefixtures("rounded")
def test_schemes_of_two_kinds_are_two_ops():
    names = ("qoq-w4a8", "qoq-w4a8-g32") * 2
    each = [weight(name, 16) for name in names]

    def run(x, *each):
        return [LINEAR(x, *held, None, name) for held, name in zip(each, names, strict=True)]

    module, _ = graph_of(run, torch.randn(3, COLUMNS), *each)
    targets = [node.target for node in module.graph.nodes]
    assert targets.count(LINEARS) == 2 and targets.count(LINEAR) == 0


def test_where_kernels_round_for_themselves_nothing_changes():
    held, x = weight("qoq-w4a8", 16), torch.randn(3, COLUMNS)
    entry = dispatch.select(linear_problem("w4a8_linear", x, "qoq-w4a8", 16))

    def run(x, held):
        return [LINEAR(x, *held, None, "qoq-w4a8") for _ in range(3)]

    module, _ = graph_of(run, x, held)
    targets = [node.target for node in module.graph.nodes]
    assert targets.count(LINEARS) == (entry.implementation.fused is not None)


@pytest.mark.parametrize("tokens", [0, 1, 4])
@pytest.mark.parametrize("name", ["qoq-w4a8", "qoq-w4a8-g32"])
def test_the_op(name, tokens, rounded):
    each = [weight(name, rows) for rows in (7, 33)]
    x, bias = torch.randn(tokens, COLUMNS), [torch.randn(7), None]
    lists = [list(kind) for kind in zip(*each, strict=True)]
    for found, held, added in zip(LINEARS(x, *lists, bias, name), each, bias, strict=True):
        assert torch.equal(found, LINEAR(x, *held, added, name))
    torch.library.opcheck(LINEARS, (x, *lists, bias, name))
