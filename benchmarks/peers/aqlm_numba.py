"""The CPU path of the package `aqlm`: one token through its numba kernel, in float32.

Needs the packages `aqlm`, `numba` and `scipy`: an ImportError without them.
"""

from __future__ import annotations

from typing import Any

import numba
import torch
from aqlm.inference_kernels.numba_kernel import numba_gemm_lut

from ..timing import Candidate, cold_copies

numba.config.THREADING_LAYER = "workqueue"  # the other one has its threads in common with PyTorch
VECTOR, BOOKS, ENTRIES = 8, 2, 256  # of aqlm-2


def candidate(out_features: int, in_features: int) -> Candidate:
    """A layer [out_features, in_features] of two codebooks of 256 8-vectors, with random codes."""
    shape = in_features // VECTOR, out_features, BOOKS
    codes = torch.randint(-128, 128, shape, dtype=torch.int8)
    copies = [codes.clone() for _ in range(cold_copies(codes.nbytes))]
    codebooks = torch.randn(BOOKS, ENTRIES, 1, VECTOR)
    scales = torch.rand(out_features, 1, 1, 1)
    x = torch.randn(1, in_features)

    def call(i: int) -> Any:
        numba.set_num_threads(torch.get_num_threads())
        return numba_gemm_lut(x, copies[i], codebooks, scales, None)

    return Candidate(call, len(copies))
