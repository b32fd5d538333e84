"""VQLinear alone: its tensors, its forward, and how it is moved and cast."""

import copy
import io
import weakref

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_vq import ops
from hf_vq.errors import VQFormatError, VQSchemeError
from hf_vq.fit import fit_weight
from hf_vq.formats import VQScheme
from hf_vq.formats.catalog import weight_scheme
from hf_vq.formats.shared import universal_tensor
from hf_vq.nn import VQLinear, share
from hf_vq.nn.quantized_module import digest

SCHEME = weight_scheme("vq-4")


def layer(scheme=SCHEME, inputs=48, outputs=24, bias=True):
    """A filled layer, and the dense weight that it was made of."""
    weight = torch.randn(outputs, inputs)
    made = VQLinear(inputs, outputs, bias, scheme)
    fitted = fit_weight(weight, scheme)
    for key, tensor in fitted.tensors.items():
        getattr(made, made.attributes[key]).data.copy_(tensor)
    made.set_shared({name: universal_tensor(scheme) for name in made.shared_names().values()})
    if bias:
        made.bias.data.normal_()
    return made, weight


def test_what_it_holds():
    made, _ = layer()
    assert isinstance(made, nn.Linear)
    assert {name: (p.dtype, p.requires_grad) for name, p in made.named_parameters()} == {
        "weight": (torch.uint8, False),
        "bias": (torch.float32, True),
        "vq_scale": (torch.float16, False),
        "vq_signs": (torch.uint8, False),
    }
    assert list(made.state_dict()) == ["weight", "bias", "vq_scale", "vq_signs"]
    assert "vq2x8r1" in repr(made) and made.weight_count() == 48 * 24
    assert made.stored_bits() == 8 * (24 * 24 + 2 * 24 * 3 + 6)


def test_forward_is_the_op():
    made, weight = layer()
    x = torch.randn(2, 3, 48, requires_grad=True)
    y = made(x)
    assert torch.equal(y, ops.linear(x, made.tensors(), made.bias, SCHEME))
    y.sum().backward()
    assert x.grad.shape == x.shape and made.bias.grad is not None and made.weight.grad is None
    assert (made.decoded() - weight).square().sum() < 0.02 * weight.square().sum()


@torch.no_grad()
def test_a_bound_kernel_sees_what_becomes_of_the_layer():
    """Nothing that is written, replaced, cast or copied is computed with as it was."""
    made, other = layer()[0], layer()[0]
    x = torch.randn(1, 48)

    def right(module, x=x):
        expected = ops.linear(x, module.tensors(), module.bias, SCHEME)
        return torch.equal(module(x), expected)

    before = made(x)
    assert right(made)
    made.weight.copy_(made.weight.flip(0))
    assert right(made) and not torch.equal(made(x), before)
    made.vq_scale.data = 2 * made.vq_scale.data
    assert right(made)
    made.load_state_dict(other.state_dict())
    assert right(made) and torch.equal(made(x), other(x))
    fresh = layer()[0]
    made.load_state_dict(fresh.state_dict(), assign=True)
    assert right(made) and torch.equal(made(x), fresh(x))
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    for copied in (copy.deepcopy(made), torch.load(file, weights_only=False)):
        assert torch.equal(copied(x), made(x))
        copied.weight.copy_(other.weight)
        assert right(copied) and not torch.equal(copied(x), made(x))
    assert right(made.to(torch.bfloat16), x.bfloat16())
    made._parameters["weight"] = nn.Parameter(made.weight[:8].clone(), requires_grad=False)
    for name in ("vq_scale", "bias"):  # a shard of it
        made._parameters[name] = nn.Parameter(made._parameters[name][:8].clone(), False)
    assert right(made) and made(x).shape == (1, 8)


def test_a_bound_kernel_keeps_no_tensor():
    made = layer()[0]
    made(torch.randn(1, 48)), made(torch.randn(50, 48))
    old = weakref.ref(made.weight)
    made._parameters["weight"] = nn.Parameter(made.weight.clone(), requires_grad=False)
    assert old() is None


def test_compiled_layers_compare_little_at_every_call():
    made = nn.ModuleList(layer()[0] for _ in range(2))
    guards = []

    def keep(entries):
        guards.extend((entry.guard_type, entry.name) for entry in entries)
        return [True] * len(entries)

    def both(x):
        return made[0](x) + made[1](x)

    torch.compiler.reset()
    x = torch.randn(1, 48)
    with torch.no_grad():
        options = {"guard_filter_fn": keep}
        compiled = torch.compile(both, backend="eager", fullgraph=True, options=options)
        assert torch.equal(compiled(x), both(x))
    assert any("vq_scale" in name for _, name in guards)
    assert not [name for _, name in guards if "attributes" in name or "scheme" in name]


def test_compiled_code_of_one_model_is_not_that_of_another():
    """The tensors of both schemes have the same shapes, and Dynamo keeps code by class."""

    class Both(nn.Module):
        def __init__(self, *layers):
            super().__init__()
            self.layers = nn.ModuleList(layers)

        def forward(self, x):
            return self.layers[0](x) + self.layers[1](x + 1)

    other = weight_scheme("quip-sharp-4")
    first, second = (Both(layer(inputs=128)[0], layer(one, 128)[0]) for one in (SCHEME, other))
    torch.compiler.reset()
    x = torch.randn(1, 128)
    with torch.no_grad():
        for model in (first, second):
            assert torch.equal(torch.compile(model, backend="eager")(x), model(x))
        replaced = first.layers[1]
        names = replaced.shared_names().values()
        replaced.set_shared({name: 2 * universal_tensor(SCHEME) for name in names})
        assert torch.equal(torch.compile(first, backend="eager")(x), first(x))


@pytest.mark.parametrize(
    "move", [lambda m: m.half(), lambda m: m.to(torch.bfloat16), copy.deepcopy]
)
def test_moving_and_casting(move):
    made, _ = layer()
    before = {name: getattr(made, name).clone() for name in made.specs}
    moved = move(made)
    for name, tensor in before.items():
        assert (
            torch.equal(getattr(moved, name), tensor) and getattr(moved, name).dtype == tensor.dtype
        )
    # A copy has a codebook of its own, until it is moved.
    shared = moved.vq_codebook.data_ptr() == share(universal_tensor(SCHEME)).data_ptr()
    assert shared == (move is not copy.deepcopy)
    assert moved.float().vq_codebook.data_ptr() == share(universal_tensor(SCHEME)).data_ptr()


def test_to_empty_and_meta_keep_dtypes():
    made = layer()[0].to("meta")
    assert made.vq_scale.is_meta and made.vq_scale.dtype == torch.float16
    assert made.to_empty(device="cpu").vq_scale.dtype == torch.float16


def test_it_is_pickled(tmp_path):
    made, _ = layer()
    buffer = io.BytesIO()
    torch.save(made, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    x = torch.randn(2, 48)
    assert torch.equal(again(x), made(x))


def test_a_learned_codebook_is_a_parameter():
    scheme = VQScheme(2, 4, codebook="tensor", scale_group=16, rotation="none")
    made, _ = layer(scheme)
    assert made.vq_codebook.shape == (1, 16, 2) and "vq_codebook" in made.state_dict()
    assert made.shared_names() == {}


def test_the_same_values_are_held_once():
    one, two = torch.arange(6.0), torch.arange(6.0)
    assert share(one) is one and share(two) is one and digest(one) == digest(two)
    del one
    assert share(two) is two  # the first one is gone
    three = torch.arange(6.0)
    assert share(three) is two


def test_the_same_bytes_may_be_other_values():
    half = torch.zeros(2, 3, dtype=torch.float16)
    for other in (half.view(torch.int16), half.view(3, 2)):
        assert share(half) is half and share(other) is other


def test_codes_never_have_the_shape_of_the_weight():
    scheme = weight_scheme("turboquant-8")
    made, weight = layer(scheme)
    assert made.weight.shape == (1, 24, 48) and made.tensors()["codes"].shape == (24, 48)
    assert (made.decoded() - weight).square().sum() < 1e-4 * weight.square().sum()
    assert made(torch.randn(5, 48)).shape == (5, 24)


def test_an_input_that_does_not_fit():
    made = VQLinear(48, 24, False, SCHEME, where="mlp.up")
    with pytest.raises(VQFormatError, match=r"mlp\.up got an input of shape \[2, 47\].*=48"):
        made(torch.zeros(2, 47))
    made.input_parts = 2  # as tensor parallelism sets it
    with pytest.raises(VQFormatError, match="in_features=24"):
        made(torch.zeros(2, 48))


def test_a_size_that_does_not_fit():
    with pytest.raises(VQSchemeError, match=r"mlp\.up has in_features=44|mlp\.up"):
        VQLinear(44, 8, False, SCHEME, where="mlp.up")


@pytest.mark.parametrize("source", [nn.Linear, Conv1D])
def test_while_it_loads_its_weight_looks_like_the_dense_one(source):
    """Some models initialize layers from outside, by the shape of `weight` (Blt)."""
    weight = torch.randn(24, 48)
    made = VQLinear(48, 24, False, SCHEME, source=source)
    made.begin_load("weight", [fit_weight(weight, SCHEME).tensors])
    assert made.weight.shape == ((24, 48) if source is nn.Linear else (48, 24))
    assert made.weight.is_meta and made.weight._is_hf_initialized
    assert "weight" not in dict(made.named_parameters())
    made.finish_load()
    assert made.weight.dtype == torch.uint8
