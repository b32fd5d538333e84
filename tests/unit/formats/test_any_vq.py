"""VQ<x, y, z> of all x and y from 1 to 16 and all z from 1 to 4 runs, whatever shares a codebook.

Random codes, scales and codebooks of few rows. The same for CUDA: tests/gpu/linear/test_any_vq.py.
"""

import pytest
import torch

from hf_vq import dispatch, ops
from hf_vq.errors import VQSchemeError
from hf_vq.formats import VQScheme
from hf_vq.formats.stored_weight import StoredWeight
from hf_vq.ops.reference import codes as reference
from tests.fixtures.random_weights import ENTRY_BITS, VECTOR_SIZES, random_tensors, schemes_of


@pytest.mark.parametrize("bits", ENTRY_BITS)
@pytest.mark.parametrize("size", VECTOR_SIZES)
def test_products_are_those_of_the_decoded_weight(size, bits):
    for spec, columns in schemes_of(size, bits):
        scheme = VQScheme.parse(spec)
        assert scheme.spec() == spec
        tensors = random_tensors(scheme, 24, columns)
        weight = reference.decode(StoredWeight.of(tensors, scheme, columns)).double()
        x = torch.randn(3, columns)
        exact = x.double() @ weight.T
        found = ops.linear(x, tensors, None, scheme)
        assert (found - exact).norm() <= 0.02 * exact.norm(), spec  # x is rounded to 8 bits
        asked = dispatch.DecodeProblem("cpu", spec, 32, columns)
        decoded = dispatch.select(asked).run(StoredWeight.of(tensors, scheme, columns))
        assert (decoded - weight).norm() <= 1e-5 * weight.norm(), spec


def test_groups_and_blocks_of_vectors_that_divide_neither():
    scheme = VQScheme.parse("vq3x5r1-tensor-g96-hadamard64")
    assert scheme.odd_factor == 3 and VQScheme.parse("vq12x5r1-tensor-g96-none").odd_factor == 3
    assert scheme.group(768) == 96 and scheme.block(768) == 64
    assert scheme.group(3 * 80) == 48 and scheme.block(3 * 80) == 16
    with pytest.raises(VQSchemeError, match="divisible by 3; the tensor has 256"):
        scheme.group(256)
    with pytest.raises(VQSchemeError, match="largest scale group that divides them, 12, is too"):
        VQScheme.parse("vq12x5r1-tensor-g96-none").group(12 * 21)
