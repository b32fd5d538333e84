"""All that knows how Transformers loads, saves and shares models."""

from ..calibration.equivalent_transforms.smooth_attention import smooth_attention
from ..calibration.kv_allocation import allocate_kv
from ..calibration.kv_codebooks import calibrate_kv
from ..interop.quantizer import adopt, release
from .config import VQConfig
from .cuda_graphs import capture
from .explain import explain
from .generation import enable_cache_backend
from .quantizer import VQHfQuantizer, register
from .residual import merge_passes, place_pass2

__all__ = [
    "VQConfig",
    "VQHfQuantizer",
    "adopt",
    "allocate_kv",
    "calibrate_kv",
    "capture",
    "enable_cache_backend",
    "explain",
    "merge_passes",
    "place_pass2",
    "register",
    "release",
    "smooth_attention",
]
