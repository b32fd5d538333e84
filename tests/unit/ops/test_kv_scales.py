"""Scales of rows that are coded one by one, against TurboQuant's table of distortion.

Rows are uniform on the sphere of R^d, so a number times sqrt(d) has the density
f(t) ~ (1 - t^2 / d)^((d - 3) / 2), whatever the rotation. Errors are integrals over f; what is
measured on random rows must be within four of its standard errors of them. In the paper (arXiv
2504.19874, section 1.3) some constants are cut: .03 for .03455, .047 for .0543.
"""

import math

import pytest
import torch

from hf_vq import ops
from hf_vq.errors import VQSchemeError
from hf_vq.formats import VQScheme, kv_scheme, tensor_specs
from hf_vq.formats.catalog import TURBOQUANT_KV_SCHEMES, scheme_name
from hf_vq.formats.shared import universal_tensor
from hf_vq.formats.universal import universal_codebook
from hf_vq.ops import projection

PAPER = {1: 0.36338, 2: 0.11748, 3: 0.03455, 4: 0.00950}  # D_mse of Lloyd and Max, d -> infinity
SIGMAS = 4


def scheme(bits, mode):
    return VQScheme(1, bits, scale_group=0, rotation="hadamard", rotation_block=0, mode=mode)


def moments(bits, dim):
    """E t c(t) and E c(t)^2 over the density of a number t of a row of length sqrt(dim): the mean
    of <x, q> and of |q|^2 for rows x of length 1."""
    reach = min(math.sqrt(dim), 12.0)
    t = torch.linspace(-reach, reach, 100_001, dtype=torch.float64)
    density = (1 - t.square() / dim).clamp_min(0) ** ((dim - 3) / 2)
    entries = universal_codebook(1, bits).double().flatten().sort().values
    nearest = entries[torch.searchsorted((entries[1:] + entries[:-1]) / 2, t)]
    return tuple(float((c * nearest * density).sum() / density.sum()) for c in (t, nearest))


def distortion(bits, dim):
    """E |x - q|^2 of `mse`."""
    along, energy = moments(bits, dim)
    return 1 - 2 * along + energy


def unit_rows(count, dim, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, dim, generator=generator)
    return torch.nn.functional.normalize(rows)


def decoded(rows, bits, mode):
    how = scheme(bits, mode)
    codebook = universal_tensor(how)
    found = ops.encode_kv(rows, codebook, how)
    assert found[1].shape[-1] == how.row_numbers
    return ops.decode_kv(*found, codebook, how, rows.shape[1])


def mean_and_error(samples):
    samples = samples.double()
    return float(samples.mean()), float(samples.std()) / math.sqrt(len(samples))


def check(samples, expected, also=0.0):
    """That the mean of samples is the expected one, but for chance (and `also`)."""
    mean, error = mean_and_error(samples)
    assert error < 0.02 * max(expected, 0.01)  # else nothing is measured
    assert abs(mean - expected) <= SIGMAS * error + also


@pytest.mark.parametrize("bits", PAPER)
def test_the_integral_is_the_paper_s_constant(bits):
    """At d -> infinity; entries are rounded to fp16, which moves an optimum by its square."""
    assert distortion(bits, 1 << 22) == pytest.approx(PAPER[bits], abs=1e-5)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("bits", PAPER)
def test_every_mode_has_its_error(bits, dim):
    """With a = <x, q> and b = |q|^2 other scales have 2 - 2 a / sqrt(b) and b / a^2 - 1. With the
    means of a and b that is the mean over rows but for a term of second order, at most 5 times the
    larger variance."""
    rows, (along, energy) = unit_rows(5_000, dim), moments(bits, dim)
    q = decoded(rows, bits, "mse")
    check((q - rows).square().sum(-1), distortion(bits, dim))
    spread = 5 * max(float(s.double().var()) for s in ((q * rows).sum(-1), q.square().sum(-1)))
    spread /= min(along, energy) ** 4
    corrected = decoded(rows, bits, "norm_corrected")
    check((corrected - rows).square().sum(-1), 2 - 2 * along / math.sqrt(energy), also=spread)
    assert (corrected.norm(dim=-1) - 1).abs().max() < 2**-10
    unbiased = decoded(rows, bits, "unbiased")
    check((unbiased - rows).square().sum(-1), energy / along**2 - 1, also=spread)
    assert ((unbiased * rows).sum(-1) - 1).abs().max() < 2**-10


@pytest.mark.parametrize(("bits", "most"), [(2, 0.1315), (4, 0.0093)])
def test_inner_products_of_the_unbiased_scale(bits, most):
    """d E <y, x - decoded>^2, y uniform on the sphere: the bar, and none of `mse`'s bias."""
    rows, others = unit_rows(10_000, 128), unit_rows(10_000, 128, seed=1)
    wrong = ((decoded(rows, bits, "unbiased") - rows) * others).sum(-1)
    mean, error = mean_and_error(128 * wrong.square())
    assert mean <= most + SIGMAS * error
    half = 0.5 * rows + math.sqrt(0.75) * others  # <x, y> = 1 / 2, nearly
    for mode, biased in (("unbiased", False), ("mse", True)):
        mean, error = mean_and_error(((decoded(rows, bits, mode) - rows) * half).sum(-1))
        assert (abs(mean) > SIGMAS * error) is biased


@pytest.mark.parametrize(("bits", "paper"), [(2, 0.56), (3, 0.18), (4, 0.0543)])
def test_the_product_estimator(bits, paper):
    """Algorithm 2: d E <y, x - decoded>^2 = D (pi / 2 - 1 / d), D that of a bit less, and no bias.

    S is one matrix: sums over its d^2 numbers differ from their mean by sqrt(2) / d of it or so."""
    dim = 1024
    rows, others = unit_rows(2000, dim), unit_rows(2000, dim, seed=1)
    wrong = decoded(rows, bits, "product") - rows
    wanted = distortion(bits - 1, dim) * (math.pi / 2 - 1 / dim)
    chance = SIGMAS * math.sqrt(2) / dim * wanted
    check(wrong.square().sum(-1), wanted, also=chance)  # y on the sphere: E <y, e>^2 = |e|^2 / d
    assert wanted == pytest.approx(paper, rel=0.03)  # two digits of the paper's table
    mean, error = mean_and_error((wrong * rows).sum(-1))
    assert abs(mean) <= SIGMAS * error + chance
    mean, error = mean_and_error((wrong * others).sum(-1))
    assert abs(mean) <= SIGMAS * error


def test_a_scale_beats_the_product_estimator():
    """At equal bits by far, with 2 bits against its 3: why it is no default."""
    rows = unit_rows(2000, 128)
    for ours, theirs in ((2, 2), (3, 3), (4, 4), (2, 3)):
        scaled = (decoded(rows, ours, "unbiased") - rows).square().sum(-1)
        projected = (decoded(rows, theirs, "product") - rows).square().sum(-1)
        assert scaled.mean() + SIGMAS * scaled.std() / 44 < projected.mean()


def test_the_projection_never_changes():
    """No file holds it: numbers of S as they were when first written."""
    found = projection._matrix(64, "cpu")
    assert found.shape == (64, 64)
    assert found[0, :3].tolist() == pytest.approx(FIRST, abs=1e-6)
    assert float(found.double().square().mean()) == pytest.approx(1, abs=4 * math.sqrt(2) / 64)


FIRST = [1.5847943, 0.0585372, -1.5085185]


def test_stored_bits():
    assert [kv_scheme(f"turboquant-4{s}").key.bits(128) for s in ("", "-nc", "-mse")] == [4.125] * 3
    assert kv_scheme("turboquant-4-prod").key.bits(128) == 4.25
    for name, both in TURBOQUANT_KV_SCHEMES.items():
        assert scheme_name(both) == name
        assert VQScheme.parse(both.key.spec()) == both.key
        assert VQScheme.from_dict(both.key.to_dict()) == both.key


def test_modes_are_of_rows():
    with pytest.raises(VQSchemeError, match="one stage and one scale"):
        VQScheme(1, 4, mode="mse")
    with pytest.raises(VQSchemeError, match="2 bits or more"):
        scheme(1, "product")
    with pytest.raises(VQSchemeError, match="mode must be one of"):
        scheme(4, "prod")
    with pytest.raises(VQSchemeError, match="for the KV cache"):
        tensor_specs(scheme(4, "mse"), 64, 64)


def test_hard_rows():
    for mode in ("norm_corrected", "mse", "product"):
        rows = torch.stack([torch.zeros(64), torch.eye(64)[3] * 1e4, torch.full((64,), 1e6)])
        found = decoded(rows, 4, mode)
        assert torch.equal(found[0], rows[0])
        assert (found[1] - rows[1]).norm() < 0.5 * rows[1].norm()
        # Beyond fp16 the scale saturates, and the direction stays.
        assert found[2].isfinite().all() and found[2].norm() < rows[2].norm()
        if mode != "product":  # whose second part makes up for some of what is missing
            small = decoded(rows[2:] / 1e3, 4, mode)[0]
            assert torch.cosine_similarity(found[2], small, dim=0) > 1 - 1e-6
