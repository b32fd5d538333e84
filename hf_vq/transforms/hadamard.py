"""Hadamard rotations of whole rows, of any size for which Paley gives a matrix.

    hadamard(x) = x (H_m (x) H_2^k) / sqrt(n),   n = m 2^k: 384 = 12 * 32, 3584 = 28 * 128

Paley's matrices: of order q + 1 for a prime q = 3 mod 4, of order 2 (q + 1) for one of 1 mod 4.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..errors import VQSchemeError
from .rotation import power_of_two_hadamard


def hadamard(x: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate rows [..., n] by one orthonormal Hadamard matrix of size n; of the dtype of `x`.

    Raises:
        VQSchemeError: no matrix of that size is known here.
    """
    size = x.shape[-1]
    odd = odd_factor(size)
    rows = power_of_two_hadamard(x.unflatten(-1, (odd, size // odd)))
    if odd > 1:
        matrix = paley(odd).to(x) / odd**0.5
        # The factor of a power of two is symmetric, Paley's first kind is not.
        rows = torch.einsum("...ik,ij->...jk", rows, matrix.T if inverse else matrix)
    return rows.flatten(-2)


def odd_factor(size: int) -> int:
    """The least m of `size` = m 2^k that has a matrix: 1, or an order of Paley's.

    Raises:
        VQSchemeError: there is none.
    """
    rest = 1
    while size > 0 and size % (2 * rest) == 0:
        rest *= 2
    factor = size // rest
    while factor > 1 and _prime_of(factor) is None:
        factor *= 2
        if factor > size:
            raise VQSchemeError(f"no Hadamard matrix of size {size} is known here.")
    return factor


def _prime_of(order: int) -> int | None:
    """q of Paley's matrix of this order."""
    if order % 4:
        return None
    first, second = order - 1, order // 2 - 1
    if _is_prime(first):  # q = 3 mod 4, as 4 divides the order
        return first
    return second if second % 4 == 1 and _is_prime(second) else None


def _is_prime(q: int) -> bool:
    return q > 1 and all(q % d for d in range(2, int(q**0.5) + 1))


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def paley(order: int) -> Tensor:
    """A matrix [order, order] of -1 and 1, float64, whose rows are orthogonal."""
    q = _prime_of(order)
    assert q is not None, f"no Paley matrix of order {order}"
    residues = torch.full((q,), -1.0, dtype=torch.float64)
    residues[torch.arange(1, q).square() % q] = 1.0
    residues[0] = 0.0
    index = torch.arange(q)
    bordered = torch.ones(q + 1, q + 1, dtype=torch.float64)
    bordered[0, 0] = 0.0
    bordered[1:, 1:] = residues[(index[:, None] - index) % q]
    eye = torch.eye(q + 1, dtype=torch.float64)
    if q % 4 == 3:
        bordered[1:, 0] = -1.0
        return bordered + eye
    plus = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    minus = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    return torch.kron(bordered, plus) + torch.kron(eye, minus)
