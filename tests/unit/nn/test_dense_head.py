"""DenseHead: PyTorch's nn.Linear but for one row of inputs on a CPU."""

import copy
import pickle

import pytest
import torch
from torch import nn

from hf_vq.backends.cpu import library
from hf_vq.nn import dense_head
from hf_vq.nn.dense_head import DenseHead

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
needs_library = pytest.mark.skipif(library.load() is None, reason=library.why_not())


def head(inputs=72, outputs=130, bias=True, dtype=torch.float32):
    return DenseHead(inputs, outputs, bias).to(dtype).requires_grad_(False)


@pytest.fixture
def runs(monkeypatch):
    """Whether each product was that of `dispatch.HEADS`."""
    found = []
    plain = dense_head.multiply_row

    def multiply_row(*args):
        y = plain(*args)
        found.append(y is not None)
        return y

    monkeypatch.setattr(dense_head, "multiply_row", multiply_row)
    return found


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (7, 3), (64, 64), (72, 130), (576, 4099)])
def test_one_row(inputs, outputs, bias, dtype, runs):
    """err <= 2 * err(PyTorch) + what one rounding of the result costs."""
    layer = head(inputs, outputs, bias, dtype)
    x = torch.randn(1, 1, inputs).to(dtype)
    y = layer(x)
    assert runs == [True] and y.dtype == dtype and y.shape == (1, 1, outputs)
    exact = copy.deepcopy(layer).double()(x.double())
    plain = nn.functional.linear(x, layer.weight, layer.bias)
    size = x.double().abs() @ layer.weight.double().abs().T
    allowed = 2 * (plain - exact).abs() + torch.finfo(dtype).eps * exact.abs() + 1e-6 * size
    assert ((y - exact).abs() <= allowed).all()


@needs_library
def test_a_row_is_the_same_wherever_it_lies():
    """Threads and streams share rows, and no sum depends on how."""
    weight, x = torch.randn(1, 100).bfloat16(), torch.randn(100).bfloat16()
    layer = head(100, 5000, bias=False, dtype=torch.bfloat16)
    layer.weight.copy_(weight.expand(5000, 100))
    assert layer(x).unique().numel() == 1


@needs_library
def test_numbers_that_are_not_finite():
    layer = head(64, 3, bias=False)
    layer.weight[1, 5], layer.weight[2, 5] = torch.inf, torch.nan
    y = layer(torch.ones(64))
    assert y.isfinite().tolist() == [True, False, False] and y[1] == torch.inf and y[2].isnan()


@pytest.mark.parametrize(
    "what", ["rows", "gradient", "autocast", "backend", "float64", "columns", "functional"]
)
def test_all_else_is_pytorch(what, runs, monkeypatch):
    layer, plain = head(), nn.Linear(72, 130)
    x = torch.randn(2 if what == "rows" else 1, 72)
    if what == "gradient":
        layer.requires_grad_(True)
    elif what == "backend":
        monkeypatch.setenv("HF_VQ_BACKEND", "reference")
    elif what == "float64":
        layer, plain, x = layer.double(), plain.double(), x.double()
    elif what == "columns":
        layer.weight.data = layer.weight.T.contiguous().T
    plain.load_state_dict(layer.state_dict())
    plain.weight.data = layer.weight.data
    with torch.autocast("cpu", torch.bfloat16, enabled=what == "autocast"):
        if what == "functional":
            assert torch.equal(torch.func.vmap(layer)(x), torch.func.vmap(plain)(x))
            assert runs in ([], [False])
            return
        y = layer(x)
        assert runs in ([], [False])
        assert torch.equal(y, plain(x)) and y.dtype == plain(x).dtype
    if what == "gradient":
        y.sum().backward()
        assert torch.equal(layer.weight.grad, x.expand(130, 72))


def test_copies_and_files():
    layer, x = head(dtype=torch.bfloat16), torch.randn(1, 72).bfloat16()
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is DenseHead and torch.equal(other(x), layer(x))
    assert isinstance(layer, nn.Linear) and list(layer.state_dict()) == ["weight", "bias"]
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x), rtol=0.02, atol=0.02)


def test_a_hook_may_keep_the_method_of_a_head_that_is_dense_again():
    layer = head()
    kept, x = layer.forward, torch.randn(2, 72)
    layer.__class__ = nn.Linear
    assert torch.equal(kept(x), layer(x))


def test_a_weight_that_is_offloaded_is_pytorchs_error():
    with pytest.raises((RuntimeError, NotImplementedError)):
        head().to("meta")(torch.randn(1, 72))


@needs_library
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_the_default_dtype_changes_nothing(dtype):
    layer, x = head(dtype=torch.bfloat16), torch.randn(1, 72).bfloat16()
    wanted = layer(x)
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(layer(x), wanted)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("what", ["more columns", "fewer columns", "bias", "dtype", "rows", "none"])
def test_what_does_not_fit_is_as_in_pytorch(what):
    layer, x = head(), torch.randn(1, 72)
    if "columns" in what:
        layer.weight = nn.Parameter(torch.randn(130, 80 if "more" in what else 64))
    elif what == "bias":
        layer.bias = nn.Parameter(torch.randn(1))
    elif what == "dtype":
        layer.bias = nn.Parameter(torch.randn(130).double())
    elif what == "rows":
        x = torch.randn(2, 36)
    else:
        layer.weight, x = nn.Parameter(torch.randn(130, 0)), torch.randn(1, 0)
    results = []
    for compute in (layer, lambda x: nn.functional.linear(x, layer.weight, layer.bias)):
        try:
            results.append(compute(x).tolist())
        except RuntimeError as error:
            results.append(str(error))
    assert results[0] == results[1]
