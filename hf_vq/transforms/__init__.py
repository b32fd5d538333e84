"""Invertible maps around a tensor."""

from .rotation import draw_signs, qr_matrix, rotate
from .smoothing import partners, smoothing_factors

__all__ = ["draw_signs", "partners", "qr_matrix", "rotate", "smoothing_factors"]
