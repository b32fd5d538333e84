"""Integration with Transformers: config, quantizer, attention, generation, saving."""

from .config import VQConfig
from .explain import explain
from .generation import enable_cache_backend
from .graphs.cuda_graphs import capture
from .in_memory.quantize import dequantize, quantize_model
from .in_memory.saved import load_quantized, save_quantized
from .quantizer import VQHfQuantizer, register
from .residual import merge_passes, place_pass2

__all__ = [
    "VQConfig",
    "VQHfQuantizer",
    "capture",
    "dequantize",
    "enable_cache_backend",
    "explain",
    "load_quantized",
    "merge_passes",
    "place_pass2",
    "quantize_model",
    "register",
    "save_quantized",
]
