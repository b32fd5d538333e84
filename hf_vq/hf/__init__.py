"""Integration with Transformers: config, quantizer, attention, generation, saving."""

from .config import VQConfig
from .cuda_graphs import capture
from .explain import explain
from .generation import enable_cache_backend
from .quantizer import VQHfQuantizer, register
from .residual import merge_passes, place_pass2

__all__ = [
    "VQConfig",
    "VQHfQuantizer",
    "capture",
    "enable_cache_backend",
    "explain",
    "merge_passes",
    "place_pass2",
    "register",
]
