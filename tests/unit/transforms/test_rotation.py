"""Rotations are orthonormal, invertible, and the same everywhere."""

import pytest
import torch

from hf_vq.errors import VQSchemeError
from hf_vq.formats import VQScheme
from hf_vq.formats.packing import unpack_bits
from hf_vq.transforms import draw_signs, qr_matrix, rotate


def scheme(kind, block=128):
    return VQScheme(2, 8, rotation=kind, rotation_block=block)


def drawn(kind, n, block):
    if kind == "random_hadamard":
        return draw_signs(n, 3)
    return qr_matrix(block, 3) if kind == "qr" else None


@pytest.mark.parametrize("kind", ["none", "hadamard", "random_hadamard", "qr"])
@pytest.mark.parametrize(("n", "block"), [(128, 128), (288, 32), (80, 16), (512, 128), (48, 16)])
def test_inverse_and_norm(kind, n, block):
    rotation = drawn(kind, n, block)
    x = torch.randn(5, 3, n)
    y = rotate(x, scheme(kind), rotation)
    back = rotate(y, scheme(kind), rotation, inverse=True)
    # A QR matrix is stored in fp16, so its inverse is its transpose up to fp16 rounding.
    eps = torch.finfo(torch.float16 if kind == "qr" else torch.float32).eps
    bound = 2 * eps * block**0.5 * x.norm(dim=-1, keepdim=True)
    assert ((back - x).abs() <= bound).all()
    assert ((y.norm(dim=-1) - x.norm(dim=-1)).abs() <= bound[..., 0]).all()
    assert kind == "none" or (y - x).abs().max() > 0.1


@pytest.mark.parametrize("n", [16, 128, 256, 1024])
def test_hadamard_is_sylvesters(n):
    matrix = torch.ones(1, 1)
    while len(matrix) < n:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    y = rotate(torch.eye(n), scheme("hadamard", 0))
    assert torch.allclose(y, matrix / n**0.5, atol=1e-6)


def test_signs_come_before_the_matrix():
    signs = draw_signs(64, 7)
    flips = 1 - 2 * unpack_bits(signs, 1, 64).float()
    x = torch.randn(4, 64)
    expected = rotate(x * flips, scheme("hadamard", 64))
    assert torch.equal(rotate(x, scheme("random_hadamard", 64), signs), expected)


def test_signs_depend_on_size_and_seed_only():
    assert torch.equal(draw_signs(256, 0), draw_signs(256, 0))
    assert not torch.equal(draw_signs(256, 0), draw_signs(256, 1))
    # Checkpoints store them; quantizing the same model anew must give the same bytes as well.
    assert draw_signs(64, 0).tolist() == [246, 39, 104, 94, 109, 250, 122, 89]


def test_qr_is_a_rotation_of_its_seed():
    matrix = qr_matrix(64, 0).float()
    # Every entry is rounded to fp16: each product of a dot product of unit rows errs by 2^-10.
    assert torch.allclose(matrix @ matrix.T, torch.eye(64), atol=2**-10)
    assert torch.equal(qr_matrix(64, 0), qr_matrix(64, 0))
    assert not torch.equal(qr_matrix(64, 0), qr_matrix(64, 1))


@pytest.mark.parametrize("kind", ["random_hadamard", "qr"])
def test_a_missing_rotation_is_an_error(kind):
    with pytest.raises(VQSchemeError, match="stored signs, diagonal or matrix"):
        rotate(torch.randn(2, 128), scheme(kind))
