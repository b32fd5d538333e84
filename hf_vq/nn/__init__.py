"""Modules that hold codes (`VQLinear`, `W4A8Linear`, `VQExperts`), and putting them in a model."""

from .experts import VQExperts
from .linear import VQLinear
from .replace import replace_modules, restore_modules
from .stored import Stored, share
from .w4a8 import W4A8Linear

__all__ = [
    "Stored",
    "VQExperts",
    "VQLinear",
    "W4A8Linear",
    "replace_modules",
    "restore_modules",
    "share",
]
