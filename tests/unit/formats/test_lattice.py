"""E8P: the codes mean what the layout says, and encoding finds the nearest of all 65536 entries."""

import pytest
import torch

from hf_vq.errors import VQFormatError
from hf_vq.formats.lattice import e8p_codebook, e8p_decode, e8p_encode, e8p_patterns
from hf_vq.formats.universal import e8p_mse

CODES = torch.arange(65536)


def at_scale(scale):
    """The codebook as a later residual stage holds it: each value rounded to float16."""
    return (e8p_codebook().float() * scale).half()


def assert_nearest(x, codebook):
    """The distance found is the least of all, up to the rounding of float64."""
    entries = e8p_decode(CODES, codebook).double()
    chosen = entries[e8p_encode(x, codebook)]
    assert not chosen.isnan().any()
    for part, found in zip(x.double().split(128), chosen.split(128), strict=True):
        # |x|^2 is common to all; what is left of each distance is a sum of 17 products
        rest = torch.addmm(entries.square().sum(1), part, entries.T, alpha=-2)
        own = found.square().sum(1) - 2 * (part * found).sum(1)
        size = part.abs() @ found.abs().amax(0) + entries.square().sum(1).max()
        assert (own - rest.amin(1) <= 64 * torch.finfo(torch.float64).eps * size).all()


def test_patterns_are_those_of_the_paper():
    patterns = e8p_patterns()
    norms, counts = patterns.square().sum(1).unique(return_counts=True)
    assert norms.tolist() == [2, 4, 6, 8, 10, 12]
    assert counts.tolist() == [1, 8, 28, 64, 126, 29]  # 227 up to 10, and 29
    assert len(patterns.unique(dim=0)) == 256
    assert ((patterns % 1) == 0.5).all()


def test_stored_codebook():
    codebook = e8p_codebook()
    scale = 4 * codebook[256, 0].double()
    assert codebook.shape == (257, 8)
    assert codebook.dtype == torch.float16
    assert torch.equal(codebook[:256].double(), e8p_patterns() * scale)
    assert (codebook[256] == codebook[256, 0]).all()


def test_entries_are_distinct_lattice_points_exact_in_float16():
    codebook = e8p_codebook()
    entries = e8p_decode(CODES, codebook)
    assert len(entries.unique(dim=0)) == 65536
    assert torch.equal(entries.half().float(), entries)
    shift = codebook[256].float()
    points = (entries - torch.where(CODES[:, None] >> 15 == 1, -shift, shift)) / (4 * shift)
    assert ((points % 1) == 0.5).all()
    assert (points.sum(1) % 2 == 0).all()


def test_layout_of_a_code():
    codebook = e8p_codebook()
    scale = 4 * float(codebook[256, 0])
    # row 1 is (1/2, ..., 1/2, 3/2), sum 5: an odd number of signs
    code = torch.tensor([[1 | 0b0000101 << 8 | 1 << 15, 1 | 0b0000001 << 8]])
    expected = torch.tensor(
        [
            [-0.5, 0.5, -0.5, 0.5, 0.5, 0.5, 0.5, -1.5],
            [-0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 1.5],
        ]
    )
    expected += torch.tensor([[-0.25], [0.25]])
    assert torch.equal(e8p_decode(code, codebook), (expected * scale)[None])
    assert torch.equal(e8p_decode(code.int(), codebook), e8p_decode(code, codebook))


@pytest.mark.parametrize("scale", [1.0, 0.3024])
def test_every_entry_survives_a_round_trip(scale):
    codebook = at_scale(scale)
    assert torch.equal(e8p_encode(e8p_decode(CODES, codebook), codebook), CODES)


@pytest.mark.parametrize("scale", [1.0, 0.3024])
@pytest.mark.parametrize("size", [0.05, 0.5, 1.0, 2.0, 100.0])
def test_encode_finds_the_nearest(size, scale):
    assert_nearest(size * torch.randn(256, 8), at_scale(scale))


def test_encode_finds_the_nearest_where_it_is_hard():
    codebook = e8p_codebook()
    entries = e8p_decode(CODES, codebook)
    pick = torch.randint(65536, (2, 128))
    norm_12 = 227 + torch.randint(29, (128,)) + (torch.randint(256, (128,)) << 8)
    step = 2 * codebook[256, 0].float()  # the grid that holds all points of symmetry
    cases = [
        torch.zeros(1, 8),
        -torch.zeros(1, 8),
        torch.full((1, 8), 1e30),
        torch.full((1, 8), -1e-30),
        torch.eye(8) * 5,
        (entries[pick[0]] + entries[pick[1]]) / 2,  # on the boundary of neighbours
        entries[norm_12] + 0.3 * torch.randn(128, 8),
        torch.randn(128, 8) * torch.tensor([10.0] + 7 * [1.0]),  # an outlier channel
        step * torch.randint(-5, 6, (128, 8)),  # many equal |coordinates|, many ties
        step * torch.randint(-1, 2, (128, 8)),
    ]
    assert_nearest(torch.cat(cases), codebook)


def test_encode_does_not_depend_on_the_batch():
    codebook, x = e8p_codebook(), torch.randn(70_000, 8)  # more than two chunks
    codes = e8p_encode(x, codebook)
    assert torch.equal(codes[-5000:], e8p_encode(x[-5000:], codebook))
    assert torch.equal(codes[:1], e8p_encode(x[:1], codebook))
    assert e8p_encode(x[:0], codebook).shape == (0,)


def test_error_on_gaussian_data():
    """A vector's error deviates by 0.66 of its mean: 2^18 of them give 0.13 %."""
    codebook, x = e8p_codebook(), torch.randn(1 << 18, 8)
    measured = float((e8p_decode(e8p_encode(x, codebook), codebook) - x).square().mean())
    assert measured <= 0.092
    assert e8p_mse() == pytest.approx(measured, rel=4 * 0.0013)


def test_other_patterns_are_refused():
    codebook = e8p_codebook()
    swapped = codebook[torch.tensor([1, 0, *range(2, 257)])]
    for wrong in (codebook[:256], codebook[:, :7], swapped, torch.zeros(257, 8), codebook * 1e-9):
        with pytest.raises(VQFormatError, match="e8p_codebook"):
            e8p_encode(torch.randn(3, 8), wrong)
