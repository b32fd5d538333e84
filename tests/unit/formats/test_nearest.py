"""The nearest entry is the nearest entry, whatever the search."""

import pytest
import torch

from hf_vq.formats.nearest import NearestEntry, nearest_entries, nearest_in_groups
from hf_vq.formats.universal import universal_codebook


def squared_distances(vectors, codebook):
    return (vectors.double()[:, None] - codebook.double()).square().sum(-1)


def assert_nearest(vectors, codebook, index):
    """Only float32 ties may differ: the chosen distance is the least one up to rounding."""
    distances = squared_distances(vectors, codebook)
    chosen = distances.gather(1, index[:, None])[:, 0]
    rounding = (
        8
        * torch.finfo(torch.float32).eps
        * (vectors.double().square().sum(1) + codebook.double().square().sum(1).max())
    )
    assert (chosen - distances.amin(1) <= rounding).all()


@pytest.mark.parametrize(("size", "bits"), [(1, 1), (1, 4), (1, 8), (2, 4), (2, 6), (2, 8), (4, 8)])
def test_universal_codebooks(size, bits):
    codebook = universal_codebook(size, bits).float()
    vectors = torch.cat(
        [torch.randn(3000, size), 40 * torch.randn(50, size), torch.zeros(1, size), codebook]
    )
    search = NearestEntry(codebook)
    index = search.index(vectors)
    assert_nearest(vectors, codebook, index)
    assert_nearest(vectors, codebook, search._compare(vectors))
    expected = squared_distances(vectors, codebook).amin(1)
    rounding = 8 * torch.finfo(torch.float32).eps * (vectors.double().square().sum(1) + 20)
    assert ((search.distance(vectors).double() - expected).abs() <= rounding).all()
    assert torch.equal(index[-len(codebook) :], torch.arange(len(codebook)))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_learned_codebooks(size):
    codebook = torch.randn(300, size)
    vectors = torch.randn(2000, size)
    assert_nearest(vectors, codebook, NearestEntry(codebook, grid=False).index(vectors))
    assert_nearest(vectors, codebook, nearest_entries(codebook[None])[0].index(vectors))
    top = NearestEntry(codebook, grid=False).top(vectors, 3)
    assert_nearest(vectors, codebook, top[:, 0])
    assert (top.sort(1).values.diff(dim=1) > 0).all()


def test_grid_handles_points_on_cell_edges():
    codebook = universal_codebook(2, 8).float()
    grid = NearestEntry(codebook)._grid
    edges = torch.arange(-2, 131) / grid.scale - grid.reach
    vectors = torch.cartesian_prod(edges, edges)
    assert_nearest(vectors, codebook, NearestEntry(codebook).index(vectors))


def test_an_equal_codebook_is_searched_with_the_same_tables():
    codebook = torch.randn(2, 64, 2)
    first, second = nearest_entries(codebook)
    assert first is not second
    assert nearest_entries(codebook.clone())[0] is first
    assert nearest_entries(codebook + 1)[0] is not first


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize(("groups", "count", "entries"), [(1, 700, 256), (37, 130, 16), (3, 1, 5)])
def test_many_codebooks_at_once(size, groups, count, entries):
    codebooks = torch.randn(groups, entries, size)
    vectors = torch.randn(groups, count, size)
    index = nearest_in_groups(vectors, codebooks)
    for group in range(groups):
        assert_nearest(vectors[group], codebooks[group], index[group])


@pytest.mark.parametrize("size", [1, 2])
def test_many_codebooks_in_small_blocks(size, monkeypatch):
    codebooks, vectors = torch.randn(9, 16, size), torch.randn(9, 50, size)
    whole = nearest_in_groups(vectors, codebooks)
    monkeypatch.setattr("hf_vq.formats.nearest._SCORES", 16 * 50 * 4)  # four groups at a time
    assert torch.equal(nearest_in_groups(vectors, codebooks), whole)
    monkeypatch.setattr("hf_vq.formats.nearest._SCORES", 16 * 7)
    assert torch.equal(nearest_in_groups(vectors, codebooks), whole)
    assert nearest_in_groups(vectors[:, :0], codebooks).shape == (9, 0)


def test_numbers_that_are_not_find_an_entry_all_the_same():
    for size in (1, 2):
        vectors = torch.tensor([torch.nan, torch.inf, -torch.inf]).repeat_interleave(size)
        index = nearest_in_groups(vectors.reshape(1, 3, size), torch.randn(1, 16, size))
        assert ((index >= 0) & (index < 16)).all()


def test_a_number_between_two_entries_takes_the_lower_one():
    """Midpoints of fp16 entries are exact in float32, so every kernel can do the same."""
    codebook = torch.randn(1, 16, 1).half().float()
    ordered = codebook.sort(1).values
    midpoints = (ordered[:, 1:] + ordered[:, :-1]) / 2
    chosen = codebook[0][nearest_in_groups(midpoints, codebook)[0]]
    assert torch.equal(chosen, ordered[0, :-1])
