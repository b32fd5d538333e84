"""Invertible maps around a tensor."""

from .hadamard import hadamard
from .rotation import draw_signs, qr_matrix, rotate, signed_diagonal
from .smoothing import output_factors, partners, smoothing_factors

__all__ = [
    "draw_signs",
    "hadamard",
    "output_factors",
    "partners",
    "qr_matrix",
    "rotate",
    "signed_diagonal",
    "smoothing_factors",
]
