"""Comparable times: interleaved runs of all candidates, with cold caches.

Machines are shared and change their clocks, so absolute times are unreliable. All candidates run in
one process, in every round. Records have the median times, and the median of
the ratios of each round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNKNOWN_CACHE = 64 << 20
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def last_level_cache() -> int:
    """Bytes of the largest cache of this processor; 64 MB where the system does not say."""
    texts = [path.read_text().strip() for path in _CACHES.glob("index*/size")]
    sizes = [int(text[:-1]) * _UNITS[text[-1]] for text in texts if text]
    return max(sizes, default=_UNKNOWN_CACHE)


def cold_copies(nbytes: int) -> int:
    """Number of copies of `nbytes` bytes that, read round-robin, always miss the caches."""
    return max(2, -(-3 * last_level_cache() // (2 * max(nbytes, 1))))


@dataclass(frozen=True)
class Candidate:
    """Computation to time: `call(i)` runs once, on copy number i of its data.

    Args:
        call: the computation.
        copies: of its data; it gets 0, 1, .. copies - 1, 0, ..
        calls: how often it is called in a round, to make short calls measurable.
    """

    call: Callable[[int], Any]
    copies: int = 1
    calls: int = 1


def interleave(
    candidates: Mapping[str, Candidate], rounds: int, warmup: int = 2, untimed: int = 0
) -> dict[str, list[float]]:
    """Seconds per call of every candidate in every round, in rounds of one turn each.

    Args:
        candidates: computations to compare, by name.
        rounds: that are timed.
        warmup: rounds before these.
        untimed: calls at the beginning of every turn. The first finds the candidate's own code,
            and Python's, in main memory, where another one's data has just filled the caches.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    turn = dict.fromkeys(candidates, 0)
    for round_ in range(warmup + rounds):
        for name, candidate in candidates.items():
            first = turn[name] + untimed
            for i in range(turn[name], first):
                candidate.call(i % candidate.copies)
            turn[name] = first + candidate.calls
            start = time.perf_counter()
            for i in range(first, first + candidate.calls):
                candidate.call(i % candidate.copies)
            passed = (time.perf_counter() - start) / candidate.calls
            if round_ >= warmup:
                seconds[name].append(passed)
    return seconds


def summary(seconds: list[float]) -> dict[str, float]:
    """Median and minimum in microseconds."""
    return {"us": median(seconds) * 1e6, "us_min": min(seconds) * 1e6}


def extrapolated(
    seconds: Mapping[str, list[float]], few: tuple[str, int], more: tuple[str, int], size: int
) -> float:
    """Seconds that `size` would take, of two candidates, each with its size, whose data stay in a
    cache. What disturbs a call only adds to it, and may be more than the difference."""
    least, most = min(seconds[few[0]]), min(seconds[more[0]])
    return least + (most - least) / (more[1] - few[1]) * (size - few[1])


def speedup(ours: list[float], peer: list[float]) -> float:
    """Speedup over the peer: the median ratio of the rounds."""
    return median(theirs / mine for mine, theirs in zip(ours, peer, strict=True))
