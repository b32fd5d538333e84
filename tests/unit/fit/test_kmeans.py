"""k-means: quality, repair, determinism, degenerate inputs."""

import pytest
import torch

from hf_vq.fit.kmeans import kmeans, kmeans_in_groups, lloyd
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
    repaired = lloyd(vectors[None], codebook[None])
    assert (repaired[0].norm(dim=1) < 10).all()
    assert error(vectors, lloyd(vectors[None], repaired)[0]) < error(vectors, codebook)


def test_more_empty_clusters_than_vectors():
    codebook = torch.cat([torch.zeros(1, 2), torch.full((15, 2), 1e3)])
    repaired = lloyd(torch.randn(2, 5, 2), codebook.expand(2, -1, -1))
    assert (repaired.norm(dim=2) < 10).all()


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


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4])
def test_groups_do_not_meet(size):
    """Each group has a codebook of its own data, wherever that lies and however large it is."""
    scale = torch.tensor([1.0, 1e-3, 50.0]).reshape(3, 1, 1)
    vectors = torch.randn(3, 3000, size) * scale + 10 * scale
    codebooks = kmeans_in_groups(vectors, 16)
    best = {1: 0.0106, 2: 0.120, 4: 0.40}[size]  # on Gaussian data, found here; 1: .0095 at best
    for group in range(3):
        found = error(vectors[group], codebooks[group]) / float(scale[group]) ** 2
        assert found < best, group


def test_codebooks_of_numbers_are_those_of_lloyd_and_max():
    """The optimum of 16 levels for Gaussian data is .009497, and the entries are known."""
    codebook = kmeans_in_groups(torch.randn(4, 60_000, 1), 16)
    assert (codebook.diff(dim=1) > 0).all()
    levels = torch.tensor([0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6180, 2.0690, 2.7326])
    expected = torch.cat([-levels.flip(0), levels])
    for group in codebook:
        assert error(torch.randn(60_000, 1), group) < 1.03 * 0.009497
    # The optimum is flat: single fits have entries up to 0.2 from it, their mean 0.02 to 0.07.
    torch.testing.assert_close(codebook[..., 0].mean(0), expected, atol=0.1, rtol=0.0)


def test_numbers_that_repeat_and_tails():
    """Most of the data in one place must not take most of the entries."""
    values = torch.cat([torch.zeros(900), torch.randn(100), torch.tensor([40.0])])
    codebook = kmeans_in_groups(values.reshape(1, -1, 1), 16)[0]
    assert codebook.isfinite().all() and error(values[:, None], codebook) < 1e-3
    constant = kmeans_in_groups(torch.full((1, 500, 1), 3.0), 16)[0]
    assert error(torch.full((1, 1), 3.0), constant) == 0


@pytest.mark.slow
def test_groups_are_seeded():
    vectors = torch.randn(5, 400, 2)
    assert torch.equal(kmeans_in_groups(vectors, 16, seed=1), kmeans_in_groups(vectors, 16, seed=1))
    assert not torch.equal(kmeans_in_groups(vectors, 16), kmeans_in_groups(vectors, 16, seed=1))


@pytest.mark.parametrize("size", [1, 2])
def test_vectors_of_more_weight_are_served_better(size):
    """Two clouds, one of weight 100."""
    near, far = torch.randn(600, size), torch.randn(600, size) + 50
    vectors = torch.cat([near, far])[None]
    weights = torch.ones(1, 1200)
    plain = kmeans_in_groups(vectors, 16, seed=1)[0]
    weights[:, :600] = 100
    heavy = kmeans_in_groups(vectors, 16, weights=weights, seed=1)[0]
    assert error(near, heavy) < 0.8 * error(near, plain)
    assert error(far, heavy) > error(far, plain)


def test_a_weight_counts_like_as_many_vectors():
    vectors = torch.randn(1, 300, 2)
    start = vectors[:, :8]  # no entry is empty
    counts = torch.randint(1, 4, (300,))
    repeated = vectors[0].repeat_interleave(counts, 0)[None]
    found = lloyd(vectors, start, counts[None].float())
    torch.testing.assert_close(found, lloyd(repeated, start), rtol=1e-4, atol=1e-5)


def test_vectors_without_weight_move_nothing():
    vectors = torch.cat([torch.randn(200, 2), torch.full((200, 2), 1e3)])[None]
    weights = torch.cat([torch.ones(200), torch.zeros(200)])[None]
    codebook = kmeans_in_groups(vectors, 8, weights=weights)
    assert codebook.isfinite().all()
    assert error(vectors[0, :200], codebook[0]) < 0.4
