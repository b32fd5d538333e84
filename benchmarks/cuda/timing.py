"""GPU times that may be compared: CUDA graphs that take turns, over data that no cache holds.

A graph holds one call on each copy of a contestant's data, so that launching from Python costs
nothing, and the copies together are larger than the L2 cache.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import torch

from ..timing import Contestant

_CALLS = 24  # at least, in a graph: starting one takes as long as a kernel


def cold_copies(nbytes: int) -> int:
    """Number of copies of `nbytes` bytes that, read round-robin, always miss the L2 cache."""
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(2, -(-3 * cache // max(nbytes, 1)))


def interleave_graphs(
    contestants: Mapping[str, Contestant], rounds: int, warmup: int = 2
) -> dict[str, list[float]]:
    """Seconds per call of every contestant in every round, in rounds of one replay each.

    Each round has an order of its own: where the GPU's power is the limit, a contestant gains from
    one before it that used little.
    """
    graphs = {name: _capture(contestant) for name, contestant in contestants.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for round_ in range(warmup + rounds):
        for name in random.Random(round_).sample(list(graphs), len(graphs)):
            graph, calls = graphs[name]
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if round_ >= warmup:
                seconds[name].append(start.elapsed_time(end) / 1e3 / calls)
    return seconds


def _capture(contestant: Contestant) -> tuple[torch.cuda.CUDAGraph, int]:
    calls = max(contestant.copies, _CALLS)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(contestant.copies):  # compiles, lets cuBLAS choose, prepares every copy
            contestant.call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            contestant.call(i % contestant.copies)
    return graph, calls
