"""How codebooks and codes are found."""

from .weight import FittedWeight, fit_weight, fixed_tensors

__all__ = ["FittedWeight", "fit_weight", "fixed_tensors"]
