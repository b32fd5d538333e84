"""`hf_vq::published_linear`: the op, whatever runs it."""

import pytest
import torch
from torch import nn

from hf_vq import ops
from hf_vq.errors import VQConfigError
from hf_vq.formats.published import AqlmLayout, VptqLayout
from hf_vq.nn.published import PublishedLinear
from hf_vq.ops import published
from hf_vq.ops.published import PublishedWeight

LAYOUTS = {
    "vptq": VptqLayout(8, 64, 16, 1, 28, 4, 4, 30, norm=True, perm=True),
    "aqlm": AqlmLayout(2, 5, 8, 2),
}


def stored(layout, rows, columns):
    """Random stored tensors by key."""
    found = {}
    for key, spec in layout.own(rows, columns).items():
        if key == "perm":
            found[key] = torch.randperm(columns).to(spec.dtype)
        elif spec.dtype.is_floating_point:
            found[key] = torch.randn(spec.shape).to(spec.dtype)
        else:
            found[key] = torch.randint(0, 16, spec.shape).to(spec.dtype)
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_reference(name):
    layout = LAYOUTS[name]
    tensors, x, bias = stored(layout, 18, 32), torch.randn(2, 3, 32), torch.randn(18)
    weight = ops.decode_published(tensors, layout, 18, 32)
    named = {s: tensors[layout.key(s)] for s in layout.suffixes if layout.key(s) in tensors}
    assert torch.equal(weight, layout.decode(named, 18, 32))
    for dtype in (torch.float32, torch.bfloat16):
        y = published.reference(
            x.to(dtype), PublishedWeight(tensors, layout, 18, x.shape[-1]), bias
        )
        expected = nn.functional.linear(x.to(dtype), weight.to(dtype), bias.to(dtype))
        assert torch.equal(y, expected)


@pytest.mark.parametrize("name", LAYOUTS)
def test_opcheck_and_gradients(name):
    layout = LAYOUTS[name]
    tensors = stored(layout, 18, 32)
    x = torch.randn(3, 32, requires_grad=True)
    bias = torch.randn(18, requires_grad=True)
    arguments = x, list(tensors.values()), list(tensors), bias, layout.spec(), 18
    torch.library.opcheck(torch.ops.hf_vq.published_linear.default, arguments)
    y = ops.published_linear(x, tensors, bias, layout.spec(), 18)
    grad = torch.randn(3, 18)
    y.backward(grad)
    weight = ops.decode_published(tensors, layout, 18, 32)
    torch.testing.assert_close(x.grad, grad @ weight)
    torch.testing.assert_close(bias.grad, grad.sum(0))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_module_compiles_as_one_graph(name):
    layout = LAYOUTS[name]
    module = PublishedLinear(layout, (18, 32), True)
    for key, tensor in stored(layout, 18, 32).items():
        getattr(module, module.attributes[key]).data.copy_(tensor)
    module.bias.data.normal_()
    x = torch.randn(3, 32)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x))


def test_a_spec_says_all():
    for layout in LAYOUTS.values():
        assert published.parse(layout.spec()) == layout
    with pytest.raises(VQConfigError, match="not a published method"):
        published.parse('{"method": "x"}')
