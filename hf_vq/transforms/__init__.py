"""Invertible maps around a tensor."""

from .rotation import draw_signs, qr_matrix, rotate

__all__ = ["draw_signs", "qr_matrix", "rotate"]
