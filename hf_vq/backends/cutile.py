"""The row `cutile.linear`, and what it needs: NVIDIA's cuTile, an optional package.

The generated CUDA kernels are faster (docs/turboquant.md), so it runs only where
HF_VQ_BACKEND=cutile asks for it. What runs it (`cutile_linear`) is imported then.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .. import env
from ..formats.scheme import VQScheme
from ..ops import dispatch

NAME = "cutile.linear"
BITS = 4  # of a pass
STEP = 128  # columns at a time
TOKENS, ROWS = 16, 64  # of a block
DTYPES = ("float16", "bfloat16")


@functools.cache
def needs() -> str | None:
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


def accepts(problem: dispatch.Problem) -> str | None:
    """None if there is a kernel for the tensors and a GPU for the kernel, else the reason why not.

    Asks `needs` itself, and only where the row is wanted: others need not know about cuTile.
    """
    if env.BACKEND.get() not in ("cutile", NAME):
        return "it runs where HF_VQ_BACKEND=cutile asks for it"
    if problem.device != "cuda":
        return f"tensor is on {problem.device}"
    if reason := needs():
        return reason
    if problem.dtype not in DTYPES:
        return f"inputs are {problem.dtype}"
    return runnable(VQScheme.parse(problem.scheme), problem.k)


def runnable(scheme: VQScheme, in_features: int) -> str | None:
    """None if the kernel can have rows of this scheme, else the reason why not."""
    nested = scheme.stages == "nested" and scheme.second_bits == BITS
    one = scheme.stages == "independent" and scheme.residuals == 1
    if (scheme.vector_size, scheme.entry_bits) != (1, BITS) or not (nested or one):
        return f"{scheme.notation()} is not one pass of {BITS} bits, or {BITS} + {BITS} nested"
    if scheme.codebook not in ("universal", "tensor") or scheme.largest_entry:
        return f"its codebook is {scheme.codebook}"
    if scheme.rotation == "qr":
        return "a QR rotation is a matrix product"
    if in_features % STEP or scheme.group(in_features) % STEP:
        return f"rows or scale groups are no multiples of {STEP}"
    return None


def _linear(*arguments: Tensor | VQScheme | None) -> Tensor:
    from . import cutile_linear

    return cutile_linear.linear(*arguments)  # type: ignore[arg-type]


def register() -> None:
    """Add the row to the dispatch table."""
    dispatch.register(dispatch.Kernel(NAME, "linear", _linear, accepts=accepts))
