"""What `triton.linear` needs and supports: for GPUs without NVRTC (ROCm, XPU).

Triton, and what it runs (`triton_linear`), is imported once `available` says that it is there.
"""

from __future__ import annotations

import functools
import math

from ...dispatch import LinearProblem
from ...formats.scheme import VQScheme
from .. import refusals

OLDEST = (3, 2)  # gathers in shared memory
VECTOR_SIZES = (1, 2, 4)  # an entry is one integer of 16, 32 or 64 bits

_WEIGHTS = 128  # of a row at a time
_SMALLEST_DOT = 16  # what Triton multiplies at least
_MOST_CODES, _WORD_BITS = 8, 32  # of a unit


@functools.cache
def available() -> str | None:
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


def supports(problem: LinearProblem) -> str | None:
    """None if there is a kernel for the tensors, else the reason why not."""
    reason = refusals.dtype(problem.dtype, refusals.FLOATS)
    return reason or runnable(VQScheme.parse(problem.scheme), problem.in_features)


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
    if reason := refusals.qr(scheme):
        return reason
    if step(scheme, in_features) < _SMALLEST_DOT:
        return f"{scheme.group(in_features)} weights share a scale, fewer than {_SMALLEST_DOT}"
    return None


def step(scheme: VQScheme, in_features: int) -> int:
    """Weights of a row that are multiplied at a time: they share a scale."""
    group = scheme.group(in_features)
    return group if group < _WEIGHTS and group != in_features else _WEIGHTS


def codes_of_unit(scheme: VQScheme, in_features: int) -> int:
    """Neighbouring codes of a row that are read at a time: at most as many as 32 bits hold,
    wherever in a byte the first one begins."""
    bits, vectors = max(scheme.entry_bits, scheme.second_bits), in_features // scheme.vector_size
    codes = _MOST_CODES
    while codes > 1 and (
        codes * bits + 8 - math.gcd(codes * bits, 8) > _WORD_BITS
        or vectors % codes
        or step(scheme, in_features) % (codes * scheme.vector_size)
    ):
        codes //= 2
    return codes
