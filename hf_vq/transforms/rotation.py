"""Block rotations along the last dimension: Hadamard, alone or behind a diagonal, or QR.

    rotate(x) = (x * d) H    per block of the row        transpose: (y H) * d

A rotation makes the coordinates of a block nearly Gaussian, so one universal codebook fits every
tensor (TurboQuant; QuIP#, section 3). With random signs d it is orthonormal: W x = rotate(W)
rotate(x).

A signed diagonal d = sign / s (`scaled_hadamard`) also divides the inputs by s and multiplies the
weights by it. Rounding spreads its error evenly over a block, so that a weight's error is d times
as large: small where the inputs are large (AWQ, arXiv 2306.00978, multiplies weights so, and has no
rotation). Then W x = rotate_weight(W) rotate(x), and the transpose of `rotate` undoes
`rotate_weight`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..errors import VQSchemeError
from ..formats.packing import pack_bits, unpack_bits
from ..formats.scheme import VQScheme

_FACTOR = 128  # a larger Hadamard matrix is applied as H_a (x) H_128
_MOST_LOG2 = 14.0  # of a diagonal: 2^-14 is the least normal number of fp16


def draw_signs(features: int, seed: int) -> Tensor:
    """Random signs of a `random_hadamard` rotation: uint8 [ceil(features / 8)], bit 1 = -1.

    They depend on `features` and `seed` only, so that layers with the same input share them.
    """
    return _signs(features, seed).clone()


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # kept for callers outside inference mode
def _signs(features: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return pack_bits(torch.randint(0, 2, (features,), generator=generator, device="cpu"), 1)


def signed_diagonal(input_scale: Tensor, seed: int) -> Tensor:
    """The diagonal of a `scaled_hadamard` rotation: fp16 [features] on the CPU, sign / s.

    Its signs are those of `draw_signs`. s has a geometric mean of 1 and lies within 2^-14 and 2^14,
    so that s and 1 / s are normal numbers of fp16.

    Args:
        input_scale: s [features], any float dtype and device; positive.
    """
    logs = input_scale.detach().to("cpu", torch.float64).log2()
    logs = (logs - logs.mean()).clamp(-_MOST_LOG2, _MOST_LOG2)
    signs = 1 - 2 * unpack_bits(_signs(len(logs), seed), 1, len(logs))
    return (signs * torch.exp2(-logs)).half()


def qr_matrix(block: int, seed: int) -> Tensor:
    """A Haar-distributed rotation [block, block] fp16, by QR of a Gaussian matrix."""
    generator = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(block, block, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian)
    return (q * r.diagonal().sign()).half()


def rotate(
    x: Tensor, scheme: VQScheme, rotation: Tensor | None = None, *, inverse: bool = False
) -> Tensor:
    """Rotate the rows of `x` [..., n], inputs of a layer, as `scheme` says.

    Args:
        rotation: packed signs of `random_hadamard`, the diagonal of `scaled_hadamard`, the matrix
            of `qr`, else None.
        inverse: the transpose, which rotates stored weights back; but for a diagonal that is no
            sign, it undoes the rotation.

    Returns:
        [..., n] of the dtype of `x`.

    Raises:
        VQSchemeError: n has no rotation block, or the rotation is missing.
    """
    if scheme.rotation == "none":
        return x
    block = scheme.block(x.shape[-1])
    rows = x.unflatten(-1, (-1, block))
    if scheme.rotation == "hadamard":
        return power_of_two_hadamard(rows).flatten(-2)
    if rotation is None:
        raise VQSchemeError(
            f"a {scheme.rotation} rotation needs its stored signs, diagonal or matrix."
        )
    if scheme.rotation == "qr":
        matrix = rotation.to(x.dtype)
        return (rows @ (matrix.T if inverse else matrix)).flatten(-2)
    if scheme.is_scaled:
        # A diagonal of fp16, rounded to bfloat16, is not that by which weights were divided.
        wide = torch.promote_types(x.dtype, torch.float32)
        return _behind_diagonal(x.to(wide), rotation.to(wide), block, inverse).to(x.dtype)
    signs = (1 - 2 * unpack_bits(rotation, 1, x.shape[-1])).to(x.dtype)
    return _behind_diagonal(x, signs, block, inverse)


def _behind_diagonal(x: Tensor, diagonal: Tensor, block: int, inverse: bool) -> Tensor:
    if inverse:
        return power_of_two_hadamard(x.unflatten(-1, (-1, block))).flatten(-2) * diagonal
    return power_of_two_hadamard((x * diagonal).unflatten(-1, (-1, block))).flatten(-2)


def power_of_two_hadamard(rows: Tensor) -> Tensor:
    """Rows [..., 2^k] times Sylvester's orthonormal Hadamard matrix, which is its own inverse."""
    size = rows.shape[-1]
    if size <= _FACTOR:
        return rows @ _hadamard_matrix(size, rows.dtype, str(rows.device))
    factors = rows.unflatten(-1, (-1, _FACTOR))
    factors = factors @ _hadamard_matrix(_FACTOR, rows.dtype, str(rows.device))
    return power_of_two_hadamard(factors.transpose(-1, -2)).transpose(-1, -2).flatten(-2)


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # kept for callers that will want gradients
def _hadamard_matrix(size: int, dtype: torch.dtype, device: str) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / size**0.5).to(device=device, dtype=dtype)
