"""Bit allocation: which scheme each layer gets, so that all of them fit into a number of bits.

    min over choices  sum_l cost[l, s_l]     with     sum_l bits[l, s_l] <= budget

Costs of layers are taken to add up (the linearity theorem of HIGGS, arXiv 2411.17525, section 4).
Solved by dynamic programming over bits, in units that all sizes are multiples of where that gives
few enough of them; else in larger ones, sizes rounded up, so that the budget still holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_MOST_UNITS = 1 << 18  # a layer's size is rounded up by less than 1 / 2^18 of the budget


def allocate(
    bits: Sequence[Sequence[int]], costs: Sequence[Sequence[float]], budget: int
) -> list[int] | None:
    """The choice of each layer; None if even the smallest choices do not fit.

    Args:
        bits: what every choice of every layer stores.
        costs: what it costs, in any unit.
        budget: bits of all layers together.
    """
    unit = math.gcd(*(size for sizes in bits for size in sizes))
    unit = max(unit, math.ceil(budget / _MOST_UNITS))
    room = budget // unit
    if room < 0:
        return None
    best = torch.zeros(room + 1, dtype=torch.float64)  # the least cost within each number of units
    choices = []
    for sizes, prices in zip(bits, costs, strict=True):
        options = torch.full((len(sizes), room + 1), torch.inf, dtype=torch.float64)
        for row, size, price in zip(options, sizes, prices, strict=True):
            if (units := math.ceil(size / unit)) <= room:
                row[units:] = best[: room + 1 - units] + price
        best, chosen = options.min(0)
        choices.append(chosen.to(torch.uint8))  # of a few schemes
    if not math.isfinite(float(best[room])):
        return None
    found = []
    for sizes, chosen in zip(reversed(bits), reversed(choices), strict=True):
        found.append(int(chosen[room]))
        room -= math.ceil(sizes[found[-1]] / unit)
    return found[::-1]
