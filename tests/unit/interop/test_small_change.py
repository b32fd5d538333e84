"""A small change of a weight stays in its codes, and what rounding adds does not point where the
change does."""

import pytest
import torch

from hf_vq import fit
from hf_vq.formats import QoQScheme
from hf_vq.formats.catalog import QOQ_SCHEMES, linear_scheme
from hf_vq.interop.small_change import decoded, fit_small_change, part_left

ROWS, COLUMNS = 256, 256
NAMES = [
    "vq-4", "vq-3", "vq-2", "turboquant-1", "turboquant-2", "turboquant-4", "turboquant-8",
    "turboquant-4+4", "turboquant-2+1", "quip-sharp-4", "quip-sharp-2", "aqlm-3", "aqlm-2-int7",
    "gptvq-2", *QOQ_SCHEMES,
    *(f"vq1x3r2-universal-g64-random_hadamard64-{kind}" for kind in ("shared", "rerotated")),
]  # fmt: skip


def changed(name, size, seed=0):
    """Weights as codes, and those plus a product of rank 2 whose rows are multiples."""
    torch.manual_seed(seed)
    scheme = linear_scheme(name)
    found = fit.fit_weight(torch.randn(ROWS, COLUMNS), scheme).tensors
    fixed = {} if isinstance(scheme, QoQScheme) else fit.fixed_tensors(scheme, COLUMNS, 0)
    tensors = {**fixed, **found}
    before = decoded(tensors, scheme, COLUMNS)
    left, right = torch.randn(ROWS, 1), torch.randn(1, COLUMNS)
    return scheme, tensors, before, before + size * before.std() * left @ right, left


@pytest.mark.parametrize("size", [0.003, 0.03])
@pytest.mark.parametrize("name", NAMES)
def test_every_scheme(name, size):
    scheme, tensors, before, wanted, left = changed(name, size)
    found = fit_small_change(wanted, tensors, scheme)
    assert all(key.startswith("codes") for key in found)
    assert all(found[key].shape == tensors[key].shape for key in found)
    after = decoded({**tensors, **found}, scheme, COLUMNS)
    assert part_left(after, before, wanted) == pytest.approx(1, abs=0.25)
    error = after - wanted
    # Independent rows put 1 / ROWS of the error into any one direction of the outputs.
    part = (left.T @ error).square().sum() / left.square().sum() / error.square().sum()
    assert part < 0.1
    again = fit_small_change(wanted, tensors, scheme)
    assert all(torch.equal(again[key], found[key]) for key in found)


def test_the_mean_of_many_is_the_weight():
    scheme, tensors, before, wanted, _ = changed("turboquant-4", 0.05)
    each = [
        decoded({**tensors, **fit_small_change(wanted, tensors, scheme, str(n))}, scheme, COLUMNS)
        for n in range(100)
    ]
    mean, change = torch.stack(each).mean(0), wanted - before
    assert (mean - wanted).norm() < 0.2 * (each[0] - wanted).norm()
    assert torch.corrcoef(torch.stack([(mean - before).flatten(), change.flatten()]))[0, 1] > 0.9


def test_other_layers_round_in_another_way():
    scheme, tensors, _, wanted, _ = changed("vq-4", 0.01)
    one, other = (fit_small_change(wanted, tensors, scheme, name) for name in ("a", "b"))
    assert not torch.equal(one["codes"], other["codes"])


def test_no_change_is_none():
    scheme, tensors, before, _, _ = changed("vq-3", 0.01)
    found = fit_small_change(before, tensors, scheme)
    again = decoded({**tensors, **found}, scheme, COLUMNS)
    assert (again - before).norm() <= 1e-3 * before.norm()


@pytest.mark.parametrize("name", ["vq-4", "turboquant-4", "qoq-w4a8"])
def test_rows_of_zeros_change_no_others(name):
    torch.manual_seed(0)
    scheme, weight = linear_scheme(name), torch.randn(64, COLUMNS)
    weight[5] = 0
    found = fit.fit_weight(weight, scheme).tensors
    fixed = {} if isinstance(scheme, QoQScheme) else fit.fixed_tensors(scheme, COLUMNS, 0)
    tensors = {**fixed, **found}
    before = decoded(tensors, scheme, COLUMNS)
    wanted = before + 0.01 * torch.randn(64, 1) @ torch.randn(1, COLUMNS)
    after = decoded({**tensors, **fit_small_change(wanted, tensors, scheme)}, scheme, COLUMNS)
    others = torch.arange(64) != 5
    assert part_left(after[others], before[others], wanted[others]) == pytest.approx(1, abs=0.3)
    assert (after - wanted)[others].norm() < 0.1 * wanted.norm()


def test_scales_of_integers_that_were_trained():
    """Their zeros are no multiples of the scales any more."""
    scheme, tensors, _, _, _ = changed("qoq-w4a8", 0.01)
    tensors["scale"] = (tensors["scale"].float() * (1 + 0.03 * torch.randn(ROWS, 1))).half()
    before = decoded(tensors, scheme, COLUMNS)
    after = decoded({**tensors, **fit_small_change(before, tensors, scheme)}, scheme, COLUMNS)
    assert (after - before).norm() < 0.02 * before.norm()


def test_a_second_change_is_rounded_in_another_way():
    scheme, tensors, before, wanted, _ = changed("vq-4", 0.01)
    first = {**tensors, **fit_small_change(wanted, tensors, scheme)}
    middle = decoded(first, scheme, COLUMNS)
    second = {**first, **fit_small_change(middle + wanted - before, first, scheme)}
    errors = middle - wanted, decoded(second, scheme, COLUMNS) - middle - (wanted - before)
    both = torch.stack([error.flatten() for error in errors])
    assert abs(torch.corrcoef(both)[0, 1]) < 0.1
