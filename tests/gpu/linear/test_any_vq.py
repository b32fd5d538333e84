"""VQ<x, y, z> of every x and y from 1 to 16 and every z from 1 to 4 on a GPU.

Rows are those of the reference, bit by bit, in memory full of NaN; products are as right as in
PyTorch. Most of the time goes into compiling 2,400 kernels: a minute with 15 processes.
"""

import pytest
import torch

from hf_vq import dispatch, ops
from hf_vq.backends.cuda.linear import dequantize
from hf_vq.formats import VQScheme
from hf_vq.ops.reference import codes as reference
from tests.fixtures.cuda_layers import check, poison, stored
from tests.fixtures.random_weights import ENTRY_BITS, VECTOR_SIZES, schemes_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("bits", ENTRY_BITS)
@pytest.mark.parametrize("size", VECTOR_SIZES)
def test_rows_are_those_of_the_reference(size, bits):
    for spec, columns in schemes_of(size, bits):
        scheme, tensors = stored(spec, 24, columns)
        asked = dispatch.DecodeProblem("cuda", spec, 32, columns)
        assert dispatch.select(asked).name == "cuda.decode", spec
        arguments = (tensors["codes"], tensors["codebook"], tensors["scale"], scheme, columns)
        found = torch.full((25, columns), float("nan"), device="cuda")
        with torch.cuda.device("cuda"):
            dequantize.DeviceWeight(*arguments).decode(0, found[:24])
        assert torch.equal(found[:24], reference.decode_rotated(*arguments)), spec
        assert found[24:].isnan().all(), spec  # nothing beyond the last row


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", VECTOR_SIZES)
def test_products(size, dtype, tokens):
    for spec, columns in schemes_of(size, 1 + (5 * size + 2) % 16):
        scheme, tensors = stored(VQScheme.parse(spec).spec(), 24, columns)
        x = torch.randn(tokens, columns, device="cuda").to(dtype)
        poison()
        check(ops.linear(x, tensors, None, scheme), x, tensors, None, scheme)
