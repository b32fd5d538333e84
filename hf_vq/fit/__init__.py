"""How codebooks and codes are found."""

from .kv import TokenSample, fit_kv_codebook
from .weight import FittedWeight, fit_weight, fixed_tensors

__all__ = ["FittedWeight", "TokenSample", "fit_kv_codebook", "fit_weight", "fixed_tensors"]
