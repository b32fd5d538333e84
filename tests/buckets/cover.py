"""As few problems as meet every value of their features, and every pair of values that occurs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import TypeVar

Features = Mapping[str, Hashable]
"""What a problem is and what its plan has, by name: each may select other code, or another way
through it. One whose name begins with `each` counts alone."""

Value = tuple[str, Hashable]
Pair = tuple[Value, ...]
ALONE = "each"
Item = TypeVar("Item")


def first_sizes(bucket: Callable[[int], Hashable], largest: int) -> dict[Hashable, int]:
    """The smallest size from 1 to `largest` of every bucket that there is."""
    found: dict[Hashable, int] = {}
    for size in range(1, largest + 1):
        found.setdefault(bucket(size), size)
    return found


def pairs(features: Features) -> Iterator[Pair]:
    """Values of features, and those of two that meet in a problem."""
    yield from ((value,) for value in features.items())
    others = [value for value in features.items() if not value[0].startswith(ALONE)]
    yield from itertools.combinations(others, 2)


def met(found: Iterable[Features]) -> set[Pair]:
    """Every value and every pair that occurs in any of them."""
    return {pair for features in found for pair in pairs(features)}


def covering(items: Iterable[Item], features: Callable[[Item], Features]) -> list[Item]:
    """Of items, those in front preferred, as few as have every pair of all of them.

    First each that has a pair which none before it has; then, from the last on, none that others
    can spare.
    """
    missing: dict[Pair, int] = {}
    kept: list[tuple[Item, list[Pair]]] = []
    for item in items:
        own = list(pairs(features(item)))
        if any(pair not in missing for pair in own):
            kept.append((item, own))
            for pair in own:
                missing[pair] = missing.get(pair, 0) + 1
    needed = []
    for item, own in reversed(kept):
        if all(missing[pair] > 1 for pair in own):
            for pair in own:
                missing[pair] -= 1
        else:
            needed.append(item)
    return needed[::-1]
