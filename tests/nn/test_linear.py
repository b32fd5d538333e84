"""VQLinear alone: its tensors, its forward, and how it is moved and cast."""

import copy
import io

import pytest
import torch
from torch import nn

from hf_vq import ops
from hf_vq.errors import VQSchemeError
from hf_vq.fit import fit_weight
from hf_vq.formats import VQScheme
from hf_vq.formats.catalog import weight_scheme
from hf_vq.formats.shared import universal_tensor
from hf_vq.nn import VQLinear, share
from hf_vq.nn.stored import digest

SCHEME = weight_scheme("vq-4")


def layer(scheme=SCHEME, inputs=48, outputs=24, bias=True):
    """A filled layer, and the dense weight that it was made of."""
    weight = torch.randn(outputs, inputs)
    made = VQLinear(inputs, outputs, bias, scheme)
    fitted = fit_weight(weight, scheme)
    for key, tensor in fitted.tensors.items():
        getattr(made, made.attributes[key]).data.copy_(tensor)
    made.fill({name: universal_tensor(scheme) for name in made.shared_names().values()})
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
    assert moved.vq_codebook.data_ptr() == share(universal_tensor(SCHEME)).data_ptr() or (
        move is copy.deepcopy
    )


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
    three = torch.arange(6.0)
    assert share(three) is two or share(three) is not None


def test_a_size_that_does_not_fit():
    with pytest.raises(VQSchemeError, match=r"mlp\.up has in_features=44|mlp\.up"):
        VQLinear(44, 8, False, SCHEME, where="mlp.up")
