"""Modules that hold codes (`VQLinear`, `W4A8Linear`, `VQExperts`), and putting them in a model."""

from .experts import VQExperts
from .linear import VQLinear
from .quantized_module import QuantizedModule, share
from .replace import replace_modules, restore_modules
from .w4a8_linear import W4A8Linear

__all__ = [
    "QuantizedModule",
    "VQExperts",
    "VQLinear",
    "W4A8Linear",
    "replace_modules",
    "restore_modules",
    "share",
]
