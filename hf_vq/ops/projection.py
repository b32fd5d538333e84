"""Signs of a random projection, which keep inner products: QJL, TurboQuant's second stage.

    codes of r      sign(S r),  |r|         S [d, d] of independent N(0, 1)
    decoded         |r| sqrt(pi / 2) / d S^T sign(S r)

The mean of <y, decoded> over S is <y, r>, its variance at most pi / 2 |y|^2 |r|^2 / d (TurboQuant,
arXiv 2504.19874, definition 1 and lemma 4).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy
import torch
from torch import Tensor


def signs(x: Tensor) -> Tensor:
    """Which numbers of S x are positive, of float32 rows `x` [..., d]: 0 or 1, int64 [..., d]."""
    return (x @ _matrix(x.shape[-1], str(x.device)).T > 0).long()


def from_signs(found: Tensor) -> Tensor:
    """The rows of length 1 that `signs` stand for: float32 [..., d]."""
    dim = found.shape[-1]
    rows = (2 * found - 1).float() @ _matrix(dim, str(found.device))
    return rows * (math.sqrt(math.pi / 2) / dim)


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # kept for callers that will want gradients
def _matrix(dim: int, device: str) -> Tensor:
    """S, which no file holds: so it is made of random bits that no version of NumPy may change,
    where torch's generator promises nothing."""
    bits = numpy.random.PCG64(dim).random_raw(dim * dim)
    uniform = torch.from_numpy(((bits >> numpy.uint64(11)) + 0.5) / 2**53)
    return torch.special.ndtri(uniform).reshape(dim, dim).to(device, torch.float32)
