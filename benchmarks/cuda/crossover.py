"""Suite `cuda-crossover`: the matrix size from which learned codebooks are worth their bits.

A codebook per tensor is stored with the tensor: on a small matrix its bits are better spent on
codes. The suite calibrates Gaussian matrices n x n, for inputs whose directions have unequal
power, with a scheme of learned codebooks and with the universal scheme of about the same bits.
Errors are errors of the outputs. One more bit divides an error by four (rate-distortion theory of
a Gaussian source), so

    at equal bits = error of the learned one / error of the other * 4^(bits - bits of the other)

below 1 is a gain, codebooks counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_vq.errors import VQBackendError
from hf_vq.fit import fit_weight, fixed_tensors
from hf_vq.fit.ldlq import Feedback
from hf_vq.formats.catalog import weight_scheme
from hf_vq.formats.stored_weight import rotation_of

UNIVERSAL = {"aqlm-3": "vq-3", "aqlm-2": "vq-2", "gptvq-2-int7": "vq-2"}
SCHEMES = tuple(UNIVERSAL)
SIZES = (512, 1024, 2048, 4096)
_TOKENS = 4  # for every input


def run(
    *,
    schemes: Sequence[str] = SCHEMES,
    sizes: Sequence[int] = SIZES,
    rounds: int = 1,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fit matrices of every size; `report` gets each row when it is known.

    Args:
        sizes: n of the n x n matrices.
        rounds: not used: nothing is timed.

    Returns:
        (settings, results) of the record.

    Raises:
        VQBackendError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise VQBackendError("the suite cuda-crossover needs a CUDA device.")
    rows = []
    for size in sizes:
        weight, moments = problem(size, "cuda")
        for name in schemes:
            row = crossing(weight, moments, name)
            rows.append(row)
            report(row)
    return {"tokens of an input": _TOKENS}, {"rows": rows}


def problem(size: int, device: str) -> tuple[Tensor, Tensor]:
    """A Gaussian matrix [size, size], and H of inputs with directions of unequal power."""
    generator = torch.Generator(device).manual_seed(size)

    def gaussian(rows: int) -> Tensor:
        return torch.randn(rows, size, generator=generator, device=device)

    weight, power = gaussian(size), torch.linspace(0.2, 2, size, device=device)
    x = (gaussian(_TOKENS * size) * power) @ gaussian(size)
    return weight, x.T @ x / len(x)


def crossing(weight: Tensor, moments: Tensor, name: str) -> dict[str, Any]:
    """One row: a scheme with learned codebooks against the universal one."""
    bits, errors = [], []
    for one in (name, UNIVERSAL[name]):
        scheme = weight_scheme(one)
        fixed = fixed_tensors(scheme, weight.shape[1], 0, weight.device)
        found = fit_weight(weight, scheme, feedback=Feedback(moments, scheme, rotation_of(fixed)))
        bits.append(stored_bits(found.tensors, weight))
        errors.append(found.output_error)
    return {
        "learned": name,
        "universal": UNIVERSAL[name],
        "size": len(weight),
        "weights": weight.numel(),
        "bits": bits[0],
        "bits_universal": bits[1],
        "error": errors[0],
        "error_universal": errors[1],
        "at_equal_bits": errors[0] / errors[1] * 4 ** (bits[0] - bits[1]),
    }


def stored_bits(tensors: dict[str, Tensor], weight: Tensor) -> float:
    """Bits per weight, with per-layer codebooks and without codebooks shared by all layers."""
    return 8 * sum(tensor.nbytes for tensor in tensors.values()) / weight.numel()
