"""Hadamard rotations of whole rows: orthonormal, of entries of one size, and undone."""

import pytest
import torch

from hf_vq import VQSchemeError
from hf_vq.transforms import hadamard
from hf_vq.transforms.hadamard import odd_factor, paley


@pytest.mark.parametrize("size", [1, 2, 12, 20, 28, 36, 64, 96, 384, 640, 896])
def test_one_matrix_of_the_size(size):
    eye = torch.eye(size, dtype=torch.float64)
    matrix = hadamard(eye)
    assert torch.equal(matrix.abs().round(decimals=12).unique().numel() * eye[0, :1], eye[0, :1])
    torch.testing.assert_close(matrix @ matrix.T, eye, rtol=0, atol=1e-12)
    torch.testing.assert_close(hadamard(matrix, inverse=True), eye, rtol=0, atol=1e-12)


@pytest.mark.parametrize("order", [12, 20, 28, 36])
def test_paleys_matrices(order):
    matrix = paley(order)
    assert (matrix.abs() == 1).all()
    assert torch.equal(matrix @ matrix.T, order * torch.eye(order, dtype=torch.float64))


def test_sizes_of_real_models():
    sizes = (384, 896, 1536, 2048, 2560, 3584, 4096, 5120, 6656, 8192)
    assert [odd_factor(size) for size in sizes] == [12, 28, 12, 1, 20, 28, 1, 20, 104, 1]


@pytest.mark.parametrize("size", [3, 6, 92, 94])
def test_sizes_without_a_matrix(size):
    with pytest.raises(VQSchemeError, match=f"no Hadamard matrix of size {size}"):
        hadamard(torch.ones(2, size))
