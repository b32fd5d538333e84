"""The fastest attention of one token that PyTorch has on a GPU, over a dense cache."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from math import inf

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..cuda.timing import cold_copies, interleave_graphs
from ..timing import Candidate

BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "maths": SDPBackend.MATH,
}
FOLDED = "heads folded"  # query heads of a key/value head as queries, as Transformers does it
_SLOWER = 1.6  # than the fastest in a first look: not timed again

Step = Callable[[Tensor, Tensor], Tensor]  # (keys, values) -> output


def fastest(
    heads: int, kv_heads: int, batch: int, context: int, dim: int, dtype: torch.dtype, most: int
) -> dict[str, Candidate]:
    """The backends that may be the fastest at one query, by name; all of them are tried.

    Args:
        most: copies of the cache.
    """
    shape = (batch, kv_heads, context, dim)
    count = min(cold_copies(2 * batch * kv_heads * context * dim * dtype.itemsize), most)
    caches = [torch.randn(2, *shape, dtype=dtype, device="cuda").unbind() for _ in range(count)]
    query = torch.randn(batch, heads, 1, dim, dtype=dtype, device="cuda")
    steps: dict[str, Step] = {}
    for name, backend in BACKENDS.items():
        steps[name] = partial(_step, query, backend)
        if heads > kv_heads:
            folded = query.view(batch, kv_heads, heads // kv_heads, dim)
            steps[f"{name}, {FOLDED}"] = partial(_step, folded, backend)
    candidates = {
        name: Candidate(lambda i, step=step: step(*caches[i]), count)  # type: ignore[misc]
        for name, step in steps.items()
    }
    looks = {name: _look(candidate) for name, candidate in candidates.items()}
    limit = _SLOWER * min(looks.values())
    return {name: candidates[name] for name, seconds in looks.items() if seconds <= limit}


def _step(query: Tensor, backend: SDPBackend, keys: Tensor, values: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(
            query, keys, values, enable_gqa=query.shape[1] > keys.shape[1]
        )


def _look(candidate: Candidate) -> float:
    """Seconds of a call, roughly; infinite if the backend does not take it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch says why a backend is not used
            candidate.call(0)
    except RuntimeError:  # no such kernel for these tensors, or no memory
        return inf
    return interleave_graphs({"look": candidate}, rounds=1, warmup=0)["look"][0]
