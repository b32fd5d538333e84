"""The universal codebooks against theory, by measurements that share nothing with their making."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_vq.errors import VQFormatError, VQSchemeError
from hf_vq.formats import universal
from hf_vq.formats.nearest import NearestEntry

LLOYD_MAX = {  # relative MSE of the optimal scalar quantizers of N(0, 1), converged in float64
    1: 0.3633802276,
    2: 0.1174818478,
    3: 0.0345477608,
    4: 0.0095010080,
    5: 0.0025046684,
    6: 6.4423967e-4,
    7: 1.6347823e-4,
    8: 4.1185083e-5,
}
PLANE = {4: 0.1075, 6: 0.02966, 8: 0.00774}  # HIGGS grids (arXiv 2411.17525)


def line(count=1 << 18, reach=9.0):
    """Midpoint rule for N(0, 1) on [-reach, reach]: points and weights, float64."""
    points = (torch.arange(count, dtype=torch.float64) + 0.5) * (2 * reach / count) - reach
    weights = torch.exp(-0.5 * points.square())
    return points, weights / weights.sum()


def mse_1d(entries):
    """The error is continuous with kinks: the midpoint rule errs by (step / entry gap)^2, 1e-5."""
    points, weights = line()
    right = torch.searchsorted(entries, points).clamp(1, len(entries) - 1)
    error = torch.minimum((points - entries[right]).abs(), (points - entries[right - 1]).abs())
    return float((error.square() * weights).sum())


@pytest.mark.parametrize(("bits", "theory"), LLOYD_MAX.items())
def test_scalar_tables_are_lloyd_max(bits, theory):
    """float16 moves an entry c by at most 2^-11 |c|; in the optimum's cells that costs 2^-22 c^2,
    on average at most 2^-22, and the nearest entry is never farther than the cell's."""
    entries = universal.universal_codebook(1, bits)[:, 0].double()
    measured = mse_1d(entries)
    assert theory * (1 - 1e-5) <= measured <= theory * (1 + 1e-5) + 2**-22
    assert measured == pytest.approx(theory, rel=0.01)
    assert universal.universal_mse(1, bits) == pytest.approx(measured, rel=1e-5)
    assert torch.equal(entries, -entries.flip(0))
    assert (entries.diff() > 0).all()


def test_scalar_entries_are_the_published_ones():
    published = [0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590]
    entries = universal.universal_codebook(1, 4)[8:, 0]
    assert torch.equal(entries, torch.tensor(published, dtype=torch.float64).half())


@pytest.mark.parametrize(("bits", "theory"), PLANE.items())
def test_plane_tables_reach_higgs(bits, theory):
    """The grid's error falls from 1e-4 at 300 points a side to 5e-5 at 640."""
    points, weights = line(400, 6.0)
    plane = torch.cartesian_prod(points, points).float()
    distance = NearestEntry(universal.universal_codebook(2, bits)).distance(plane)
    measured = float((distance.double() * torch.outer(weights, weights).flatten()).sum()) / 2
    assert measured == pytest.approx(theory, rel=0.01)
    assert universal.universal_mse(2, bits) == pytest.approx(measured, rel=5e-4)


def test_four_dimensional_table():
    """The squared error of a vector deviates by 0.91 of its mean: 2^19 of them give 0.13 %, an
    eighth of the margin to 0.098."""
    vectors = torch.randn(1 << 19, 4)
    search = NearestEntry(universal.universal_codebook(4, 8))
    measured = float(search.distance(vectors).double().mean()) / 4
    assert measured <= 0.098
    assert universal.universal_mse(4, 8) == pytest.approx(measured, rel=4 * 0.0013)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("more", [1, 2, 3, 4])
def test_nested_tables_refine_the_cells_of_the_first(bits, more):
    first = universal.universal_codebook(1, bits)[:, 0].double()
    rows = universal.nested_codebook(bits, more).double().reshape(2**bits, 2**more)
    assert (rows.flatten().diff() > 0).all()  # the nearest of all is found by bisection
    assert torch.equal(rows, -rows.flip(0, 1))
    points, weights = line()
    index = torch.bucketize(points, (first[1:] + first[:-1]) / 2)
    error = torch.full_like(points, torch.inf)
    for column in rows.T:
        error = torch.minimum(error, (points - column[index]).square())
    measured = float((error * weights).sum())
    assert universal.nested_mse(bits, more) == pytest.approx(measured, rel=1e-4)
    best = LLOYD_MAX[bits + more]
    assert 0.999 * best < measured < 1.1 * best  # 1 + b is the table of 1 + b bits itself
    theory = {(4, 4): 4.29e-5, (4, 3): 1.69e-4, (4, 2): 6.58e-4, (4, 1): 2.52e-3}
    if (bits, more) in theory:
        assert measured == pytest.approx(theory[bits, more], rel=0.01)


@pytest.mark.parametrize("shape", [(2, 4), (2, 6), (2, 8), (4, 8)])
def test_frequent_entries_come_first(shape):
    codebook = universal.universal_codebook(*shape)
    index = NearestEntry(codebook).index(torch.randn(40_000, shape[0]))
    quarters = torch.bincount(index, minlength=len(codebook)).reshape(4, -1).sum(1)
    assert (quarters.diff() < 0).all()


def test_what_exists():
    shapes = universal.available()
    assert shapes == (*((1, bits) for bits in range(1, 9)), (2, 4), (2, 6), (2, 8), (4, 8))
    for size, bits in shapes:
        codebook = universal.universal_codebook(size, bits)
        assert codebook.shape == (2**bits, size)
        assert codebook.dtype == torch.float16
        assert len(codebook.unique(dim=0)) == 2**bits
        assert codebook is universal.universal_codebook(size, bits)
    for name in ("gauss_2x8", "nested_1x4", "e8p_patterns", "e8p_shift"):
        tensor = universal.universal_tensor(name)
        assert universal.universal_hash(name) == universal.tensor_hash(tensor)


def test_what_does_not_exist_says_what_does():
    with pytest.raises(VQSchemeError, match=r"size 3 and 5 bits.*<1,1>.*<2,8>, <4,8>"):
        universal.universal_codebook(3, 5)
    with pytest.raises(VQSchemeError, match="gauss_2x8"):
        universal.universal_tensor("gauss_3x5")
    with pytest.raises(VQSchemeError, match="nested_1x4"):
        universal.nested_codebook(5, 2)


def test_a_corrupted_file_raises(tmp_path):
    original = universal._FILE.read_bytes()
    path = tmp_path / "universal.safetensors"
    path.write_bytes(original)
    assert set(universal.read_universal(path)) == set(load_file(path))
    for position in (len(original) - 1, len(original) // 2):  # within the data, which is the rest
        damaged = bytearray(original)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(VQFormatError):
            universal.read_universal(path)
    path.write_bytes(original[:-2])
    with pytest.raises(VQFormatError):
        universal.read_universal(path)
    save_file({"gauss_1x1": torch.zeros(2, 1)}, path)
    with pytest.raises(VQFormatError, match="no file of universal codebooks"):
        universal.read_universal(path)
    with pytest.raises(VQFormatError):
        universal.read_universal(tmp_path / "absent.safetensors")
