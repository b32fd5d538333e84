"""All that knows how Transformers loads, saves and shares models."""

from .config import VQConfig
from .explain import explain
from .quantizer import VQHfQuantizer, register

__all__ = ["VQConfig", "VQHfQuantizer", "explain", "register"]
