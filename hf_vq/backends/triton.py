"""The row `triton.linear`, and what it needs: for GPUs without NVRTC (ROCm, XPU).

Triton, and what it runs (`triton_linear`), is imported when a tensor on a GPU asks for it.
"""

from __future__ import annotations

import functools

from torch import Tensor

from ..formats.scheme import VQScheme
from ..ops import dispatch

OLDEST = (3, 2)  # gathers in shared memory
DEVICES = ("cuda", "xpu")  # PyTorch calls ROCm cuda
DTYPES = ("float16", "bfloat16", "float32")
VECTOR_SIZES = (1, 2, 4)  # an entry is one integer of 16, 32 or 64 bits

_WEIGHTS = 128  # of a row at a time
_SMALLEST_DOT = 16  # what Triton multiplies at least


@functools.cache
def needs() -> str | None:
    """None if Triton is here and finds a GPU, else the reason why not."""
    try:
        import triton
        from triton.runtime import driver
    except ImportError:
        return "Triton is not installed: pip install hf-vq[triton]"
    if tuple(map(int, triton.__version__.split(".")[:2])) < OLDEST:
        return f"Triton {triton.__version__} is older than {'.'.join(map(str, OLDEST))}"
    try:
        target = driver.active.get_current_target()
    except Exception as error:  # each of its backends raises others: no GPU, no C compiler, ..
        return f"Triton finds no GPU that it can use: {error}"
    if target.backend == "cuda" and target.arch < 80:
        return f"the GPU has compute capability {target.arch / 10}, less than 8.0"
    return None


def accepts(problem: dispatch.Problem) -> str | None:
    """None if there is a kernel for the tensors and a GPU for the kernel, else the reason why not.

    Asks `needs` itself, and of a tensor on a GPU only: others need not know about Triton.
    """
    if problem.device not in DEVICES:
        return f"tensor is on {problem.device}"
    if reason := needs():
        return reason
    if problem.dtype not in DTYPES:
        return f"inputs are {problem.dtype}"
    return runnable(VQScheme.parse(problem.scheme), problem.k)


def runnable(scheme: VQScheme, in_features: int) -> str | None:
    """None if the kernels can have rows of this scheme, else the reason why not."""
    if scheme.two_passes and scheme.stages != "nested":
        return f"its passes are {scheme.stages}, not nested"
    if scheme.streams > 1:
        return f"it has {scheme.streams} stages"
    if scheme.lattice or scheme.codebook not in ("universal", "tensor"):
        return f"its codebook is {scheme.lattice or scheme.codebook}"
    if scheme.vector_size not in VECTOR_SIZES:
        return f"vectors have {scheme.vector_size} weights, not one of {VECTOR_SIZES}"
    if scheme.rotation == "qr":
        return "a QR rotation is a matrix product"
    smallest = _SMALLEST_DOT * scheme.vector_size
    if step(scheme, in_features) < smallest:
        return f"{scheme.group(in_features)} weights share a scale, fewer than {smallest}"
    return None


def step(scheme: VQScheme, in_features: int) -> int:
    """Weights of a row that are multiplied at a time: they share a scale."""
    group = scheme.group(in_features)
    return group if group < _WEIGHTS and group != in_features else _WEIGHTS


def planes(scheme: VQScheme, in_features: int) -> int:
    """Neighbouring weights that are decoded together, and multiplied one after the other: those of
    a vector, or of the scalar codes in a byte."""
    bits = max(scheme.entry_bits, scheme.second_bits)
    if scheme.vector_size > 1 or bits not in (1, 2, 4):
        return scheme.vector_size
    p = 8 // bits
    while in_features % p or step(scheme, in_features) < _SMALLEST_DOT * p:
        p //= 2
    return p


def _linear(*arguments: Tensor | VQScheme | None) -> Tensor:
    from . import triton_linear

    return triton_linear.linear(*arguments)  # type: ignore[arg-type]


def register() -> None:
    """Add the row to the dispatch table."""
    dispatch.register(dispatch.Kernel("triton.linear", "linear", _linear, accepts=accepts))
