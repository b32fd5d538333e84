"""Suite `cuda-int8`: layers on codes with int8 inputs (`activations_bits=8`) on a Hopper GPU.

Peers in the same run: dense layers in bfloat16, the same codes with 16-bit inputs, and `qoq-w4a8`.
Inputs are bfloat16, and rotating and rounding them is timed in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_vq import dispatch, ops
from hf_vq.errors import VQBackendError
from hf_vq.formats.catalog import weight_scheme
from hf_vq.ops.library import linear_problem

from ..timing import Candidate, speedup, summary
from . import w4a8
from .linear import copies_of, dense, ours
from .timing import interleave_graphs

SCHEMES = ("vq-4", "turboquant-4", "vq-3", "vq-2", "quip-sharp-2")
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (28672, 8192))  # out_features, in_features
TOKENS = (128, 256, 512, 1024, 4096)
_PEER = "qoq-w4a8-g128"
_DTYPE = torch.bfloat16


def run(
    *,
    schemes: Sequence[str] = SCHEMES,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    tokens: Sequence[int] = TOKENS,
    rounds: int = 6,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Time every scheme at every shape; `report` gets each row when it is known.

    Args:
        tokens: rows of the input.

    Returns:
        (settings, results) of the record.

    Raises:
        VQBackendError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise VQBackendError("the suite cuda-int8 needs a CUDA device.")
    found: list[dict[str, Any]] = []
    for shape in shapes:
        layers = {name: copies_of(weight_scheme(name), *shape) for name in schemes}
        peer = w4a8.copies_of(_PEER, *shape)
        for count in tokens:
            for row in _rows(layers, peer, *shape, count, rounds):
                found.append(row)
                report(row)
    return {"rounds": rounds, "dtype": str(_DTYPE)[6:]}, {"rows": found}


@torch.no_grad()
def _rows(
    layers: dict[str, Any], peer: Any, out_features: int, in_features: int, tokens: int, rounds: int
) -> list[dict[str, Any]]:
    x = torch.randn(tokens, in_features, dtype=_DTYPE, device="cuda")
    candidates = {"bf16": dense(x, out_features)}
    candidates[_PEER] = Candidate(lambda i: ops.w4a8_linear(x, peer[i], None, _PEER), len(peer))
    kernels = {}
    for name, sets in layers.items():
        for bits in (16, 8):
            scheme = weight_scheme(name).with_activations(bits)
            label = name if bits == 16 else f"{name}, int8"
            candidates[label] = ours(x, sets, scheme)
            problem = linear_problem("linear", x, scheme.spec(), out_features)
            kernels[label] = dispatch.select(problem).name
    seconds = interleave_graphs(candidates, rounds)
    return [
        {"what": "linear", "name": name, "tokens": tokens, "out_features": out_features,
         "in_features": in_features, "kernel": kernels.get(name), **summary(seconds[name]),
         "speedup": {"bf16": speedup(seconds[name], seconds["bf16"])}}
        for name in candidates
    ]  # fmt: skip
