"""Thread scaling of arithmetic in cache: an upper bound for the scaling of every kernel.

A host may run two processors of a guest on one core, or only part of the time."""

from __future__ import annotations

import torch

from ..timing import Candidate

SIZE = 512


def arithmetic() -> Candidate:
    """Multiplies matrices [SIZE, SIZE] that stay in a cache, in float32."""
    a, b, out = torch.randn(3, SIZE, SIZE).unbind()
    return Candidate(lambda i: torch.mm(a, b, out=out))
