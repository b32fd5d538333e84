"""The dense weight of a layer in place of its codes, and encoding it again."""

import pytest
import torch

from hf_vq.errors import VQBackendError
from hf_vq.fit import fit_weight, fixed_tensors
from hf_vq.formats.catalog import QOQ_SCHEMES, WEIGHT_SCHEMES, linear_scheme
from hf_vq.interop.dense_weight import dense_weight, encode_again
from hf_vq.nn import VQLinear
from hf_vq.nn.replace import linear_class
from tests.fixtures.random_weights import REROTATED, SCALED_SCHEMES, SHARED, fit

FIXED = ("signs", "diagonal", "rotation")
KINDS = [*WEIGHT_SCHEMES, *QOQ_SCHEMES, *SCALED_SCHEMES, REROTATED, SHARED]


@pytest.mark.parametrize("name", KINDS)
def test_a_layer_is_encoded_again(name):
    """As its matrix would be from the start, behind the rotation that it has."""
    scheme = linear_scheme(name)
    layer = layer_of(name, torch.randn(64, 256), bias=True)
    keys = {attribute: key for key, attribute in layer.attributes.items()}
    bias = layer.bias
    fixed = {key: getattr(layer, key).clone() for key in keys if key[3:].startswith(FIXED)}
    dense = torch.randn(64, 256)
    error = encode_again(layer, dense).error
    assert all(torch.equal(getattr(layer, key), tensor) for key, tensor in fixed.items())
    found = (layer.decoded() - dense).square().sum() / dense.square().sum()
    assert float(found) == pytest.approx(error, rel=1e-4) and layer.bias is bias
    if not any(key.startswith("diagonal") for key in layer.attributes):
        for key, tensor in fit_weight(dense, scheme).tensors.items():
            now = getattr(layer, layer.attributes[key])
            assert torch.equal(now.reshape(tensor.shape), tensor) and not now.requires_grad


@pytest.mark.parametrize("name", KINDS)
def test_a_small_change_is_not_lost(name):
    """An adapter's change, a fraction of a step: what it adds to outputs where it reads and writes
    is still added. Rounded to nearest, at most a tenth of it would be left of most schemes."""
    scheme = linear_scheme(name)
    torch.manual_seed(3)
    tiled = getattr(scheme, "codebook", "") == "tile"  # of 256 x 256: several, and parts of some
    rows, columns = (300, 768) if tiled else (128, 256)
    layer = layer_of(name, torch.randn(rows, columns))
    before, reads, writes = layer.decoded(), torch.randn(4, columns), torch.randn(rows, 4)
    change = 0.015 * writes @ reads
    encode_again(layer, before + change)
    left = layer.decoded() - before
    wrong = float(
        (writes.T @ (left - change) @ reads.T).norm() / (writes.T @ change @ reads.T).norm()
    )
    assert wrong < (0.4 if scheme.bits(256) > 1.9 else 0.6)


def layer_of(name="vq-4", weight=None, bias=False):
    scheme = linear_scheme(name)
    weight = torch.randn(64, 256) if weight is None else weight
    layer = linear_class(scheme)(*weight.T.shape, bias, scheme, where="model.layer")
    layer.assign(fit(weight, scheme).tensors, layer.bias)
    universal = fixed_tensors(scheme, 256, 0)
    keys = {attribute: key for key, attribute in layer.attributes.items()}
    layer.set_shared({one: universal[keys[n]] for n, one in layer.shared_names().items()})
    return layer


def test_a_view_shows_the_dense_weight():
    layer = layer_of()
    codes, decoded = layer.weight, layer.decoded()
    x = torch.randn(3, 256)
    y = layer(x)
    with dense_weight(layer, encode=True) as encoded:
        assert torch.equal(layer.weight, decoded) and isinstance(layer, VQLinear)
        assert layer.weight is layer.weight and isinstance(layer.weight, torch.nn.Parameter)
        assert torch.equal(layer(x), y) and layer.state_dict()["weight"] is not None
        assert layer.state_dict()["weight"].dtype == torch.uint8
    assert layer.weight is codes and encoded == [] and type(layer) is VQLinear
    with dense_weight(layer, dtype=torch.bfloat16):
        assert layer.weight.dtype == torch.bfloat16
        layer.weight.data += 1
    assert layer.weight is codes and torch.equal(layer.decoded(), decoded)


@pytest.mark.parametrize("how", ["in place", "data", "parameter", "nested"])
def test_what_is_changed_is_encoded(how):
    layer = layer_of()
    before = layer.decoded()
    change = torch.randn(64, 256)
    with dense_weight(layer, encode=how != "nested") as encoded:
        if how == "in place":
            layer.weight.data += change
        elif how == "data":
            layer.weight.data = layer.weight.data + change
        elif how == "parameter":
            layer.weight = torch.nn.Parameter(layer.weight.data + change)
        else:
            with dense_weight(layer, encode=True) as inner:
                layer.weight.data += change
            assert inner == [] and torch.equal(layer.weight, before + change)
    wanted, found = before + change, layer.decoded()
    error = (found - wanted).square().sum() / wanted.square().sum()
    assert encoded[0].error == pytest.approx(float(error), rel=1e-4) and error < 0.02
    kept = ((found - before) * change).sum() / change.square().sum()
    assert encoded[0].kept == pytest.approx(float(kept), rel=1e-4) and 0.9 < kept < 1.1


def test_errors_change_nothing():
    layer = layer_of()
    codes = layer.weight
    with pytest.raises(KeyError), dense_weight(layer, encode=True):
        layer.weight.data += 1
        raise KeyError
    assert layer.weight is codes and type(layer) is VQLinear
    layer.to("meta")
    with dense_weight(layer), pytest.raises(VQBackendError, match=r"model\.layer is offloaded"):
        _ = layer.weight
    layer.second = object()
    with pytest.raises(VQBackendError, match="cannot be encoded again"):
        encode_again(layer, torch.randn(64, 256))
