"""Comparable GPU times: interleaved runs of CUDA graphs, with a cold L2 cache.

A graph holds one call on each copy of a candidate's data, so that launching from Python costs
nothing, and the copies together are larger than the L2 cache.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import torch

from ..timing import Candidate

_CALLS = 24  # at least, in a graph: starting one takes as long as a kernel


def cold_copies(nbytes: int) -> int:
    """Number of copies of `nbytes` bytes that, read round-robin, always miss the L2 cache."""
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(2, -(-3 * cache // max(nbytes, 1)))


def interleave_graphs(
    candidates: Mapping[str, Candidate], rounds: int, warmup: int = 2
) -> dict[str, list[float]]:
    """Seconds per call of every candidate in every round, in rounds of one replay each.

    Each round has its own random order: where the GPU's power is the limit, a candidate gains from
    one before it that used little.
    """
    graphs = {name: _capture(candidate) for name, candidate in candidates.items()}
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
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


def _capture(candidate: Candidate) -> tuple[torch.cuda.CUDAGraph, int]:
    calls = max(candidate.copies, _CALLS)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(candidate.copies):  # compiles, lets cuBLAS choose, prepares every copy
            candidate.call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            candidate.call(i % candidate.copies)
    return graph, calls
