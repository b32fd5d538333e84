"""Modules that hold codes: `VQLinear`, `VQExperts`, and their replacement in a model."""

from .experts import VQExperts
from .linear import VQLinear
from .replace import replace_modules, restore_modules
from .stored import Stored, share

__all__ = ["Stored", "VQExperts", "VQLinear", "replace_modules", "restore_modules", "share"]
