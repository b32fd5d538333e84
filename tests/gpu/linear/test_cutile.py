"""The entry `cutile.linear` on a GPU is the product."""

import pytest
import torch

from hf_vq.formats import weight_scheme
from hf_vq.ops.codes import stored_arguments
from hf_vq.ops.reference import codes as reference
from tests.fixtures.random_weights import random_tensors


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["turboquant-4", "turboquant-4+4"])
@pytest.mark.parametrize(
    ("tokens", "rows", "columns"), [(1, 64, 128), (17, 130, 1152), (33, 1, 256)]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_it_is_the_product(name, tokens, rows, columns, dtype, monkeypatch):
    """Against float64, not much further than the same product by torch in this dtype."""
    pytest.importorskip("cuda.tile", reason="cuTile is not installed: hf-vq[cuda-tile]")
    scheme = weight_scheme(name)
    tensors = {key: tensor.cuda() for key, tensor in random_tensors(scheme, rows, columns).items()}
    given = stored_arguments(tensors)
    x, bias = (torch.randn(*size, device="cuda").to(dtype) for size in ((tokens, columns), (rows,)))
    monkeypatch.setenv("HF_VQ_BACKEND", "cutile")
    y = torch.ops.hf_vq.linear.default(x, *given, bias, scheme.spec())
    monkeypatch.undo()
    dense = reference.decode(*given, scheme, columns)
    exact = x.double() @ dense.double().T + bias.double()
    plain = torch.nn.functional.linear(x, dense.to(dtype), bias)
    size = x.double().abs() @ dense.double().abs().T
    eps = torch.finfo(dtype).eps
    allowed = 2 * (plain - exact).abs().max() + 4 * eps * size.max() / columns**0.5
    assert (y - exact).abs().max() <= allowed
