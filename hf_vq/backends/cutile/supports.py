"""What `cutile.linear` needs and supports: NVIDIA's cuTile, an optional package.

What runs it (`cutile_linear`) is imported once `available` says that it is there.
"""

from __future__ import annotations

import functools

import torch

from ...dispatch import LinearProblem
from ...formats.scheme import VQScheme
from .. import refusals

BITS = 4  # of a pass
STEP = 128  # columns at a time
TOKENS, ROWS = 16, 64  # of a block


@functools.cache
def available() -> str | None:
    """None if cuTile is here and there is a GPU for it, else the reason why not."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "there is no NVIDIA GPU"
    if torch.cuda.get_device_capability() < (8, 0):
        return "the GPU has a compute capability below 8.0"
    try:
        import cuda.tile  # noqa: F401
    except ImportError as error:
        return f"cuTile is not installed: pip install hf-vq[cuda-tile] ({error})"
    return None


def supports(problem: LinearProblem) -> str | None:
    """None if there is a kernel for the tensors, else the reason why not."""
    reason = refusals.dtype(problem.dtype, refusals.HALVES)
    return reason or runnable(VQScheme.parse(problem.scheme), problem.in_features)


def runnable(scheme: VQScheme, in_features: int) -> str | None:
    """None if the kernel can have rows of this scheme, else the reason why not."""
    nested = scheme.stages == "nested" and scheme.second_bits == BITS
    one = scheme.stages == "independent" and scheme.residuals == 1
    if (scheme.vector_size, scheme.entry_bits) != (1, BITS) or not (nested or one):
        return f"{scheme.notation()} is not one pass of {BITS} bits, or {BITS} + {BITS} nested"
    if scheme.codebook not in ("universal", "tensor") or scheme.largest_entry:
        return f"its codebook is {scheme.codebook}"
    if reason := refusals.qr(scheme):
        return reason
    if in_features % STEP or scheme.group(in_features) % STEP:
        return f"rows or scale groups are no multiples of {STEP}"
    return None
