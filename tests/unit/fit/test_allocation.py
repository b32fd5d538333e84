"""Bit allocation against all choices there are."""

from itertools import product

import pytest
import torch

from hf_vq.fit.allocation import allocate


@pytest.mark.parametrize("unit", [1, 96])
@pytest.mark.parametrize("seed", range(6))
def test_no_choice_is_better(seed, unit):
    generator = torch.Generator().manual_seed(seed)
    bits = (unit * torch.randint(1, 30, (5, 3), generator=generator)).tolist()
    costs = torch.rand(5, 3, generator=generator).tolist()

    def total(choice, table):
        return sum(row[one] for row, one in zip(table, choice, strict=True))

    least = sum(map(min, bits))
    for budget in (least, least + 7 * unit, least + 40 * unit, 200 * unit):
        found = allocate(bits, costs, budget)
        assert total(found, bits) <= budget
        within = [c for c in product(range(3), repeat=5) if total(c, bits) <= budget]
        assert total(found, costs) == pytest.approx(min(total(c, costs) for c in within))
    assert allocate(bits, costs, least - 1) is None and allocate(bits, costs, -5) is None


@pytest.mark.slow
def test_little_of_the_budget_of_many_layers_is_left():
    """The matrices of a model of 70 billion weights at 2, 3 and 4 bits, of odd sizes: rounded up,
    560 layers lose at most 560 / 2^18 of the budget, and the choice is 1 bit of one layer apart."""
    shapes = [(8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192)] + 3 * [(8192, 28672)]
    bits = [
        [rows * columns * n + 8 * i + 1 for n in (2, 3, 4)]
        for i in range(80)
        for rows, columns in shapes
    ]
    costs = [[16.0, 4.0, 1.0] for _ in bits]
    weights = 80 * sum(rows * columns for rows, columns in shapes)
    found = allocate(bits, costs, 3 * weights)
    used = sum(sizes[one] for sizes, one in zip(bits, found, strict=True))
    left = 3 * weights - used
    assert 0 <= left <= 3 * weights * 560 / 2**18 + 8192 * 28672


def test_odd_sizes_of_a_large_model_stay_within_the_budget():
    """Their common unit is one bit, so the table has larger ones."""
    bits = [[10_000_019 + 13 * i, 20_000_003 + 7 * i] for i in range(40)]
    costs = [[2.0 + i, 1.0] for i in range(40)]
    budget = 600_000_000
    found = allocate(bits, costs, budget)
    assert sum(sizes[one] for sizes, one in zip(bits, found, strict=True)) <= budget
    assert found == [0] * 21 + [1] * 19, "the most is saved where it costs most"
