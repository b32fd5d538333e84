"""k-means: quality, repair, determinism, degenerate inputs."""

import pytest
import torch

from hf_vq.fit.kmeans import _lloyd, kmeans
from hf_vq.formats.nearest import NearestEntry


def error(vectors, codebook):
    index = NearestEntry(codebook, grid=False).index(vectors)
    return float((vectors - codebook[index]).square().mean())


def test_separated_clusters_are_found():
    centres = torch.cartesian_prod(*[torch.arange(4.0)] * 2) * 10
    vectors = centres.repeat(50, 1) + 0.01 * torch.randn(800, 2)
    codebook = kmeans(vectors, 16)
    assert error(vectors, codebook) < 2e-4  # the noise: 1e-4


def test_gaussian_error_is_near_the_optimum():
    """Twice the sample the codebook sees; .1175 is Lloyd-Max at 2 bits, .1075 the 2-D optimum."""
    vectors = torch.randn(40_000, 2)
    assert error(vectors, kmeans(vectors, 16)) < 0.1175


def test_empty_clusters_are_repaired():
    vectors = torch.randn(500, 2)
    codebook = torch.cat([vectors[:8], torch.full((8, 2), 1e3)])
    repaired = _lloyd(vectors, codebook)
    assert (repaired.norm(dim=1) < 10).all()
    assert error(vectors, _lloyd(vectors, repaired)) < error(vectors, codebook)


def test_same_seed_same_codebook():
    vectors = torch.randn(2000, 4)
    assert torch.equal(kmeans(vectors, 32, seed=1), kmeans(vectors, 32, seed=1))
    assert not torch.equal(kmeans(vectors, 32, seed=1), kmeans(vectors, 32, seed=2))


@pytest.mark.parametrize("count", [1, 7, 16])
def test_fewer_vectors_than_entries(count):
    vectors = torch.randn(count, 2)
    codebook = kmeans(vectors, 16)
    assert codebook.shape == (16, 2)
    assert error(vectors, codebook) < 1e-10


def test_equal_vectors():
    codebook = kmeans(torch.ones(100, 2), 16)
    assert codebook.isfinite().all()
    assert error(torch.ones(5, 2), codebook) == 0
