"""All that knows how Transformers loads, saves and shares models."""

from .calibration.cache import calibrate_kv
from .calibration.cache_bits import allocate_kv
from .calibration.smooth import smooth_attention
from .config import VQConfig
from .explain import explain
from .generation import enable_cache_backend
from .graphs import capture
from .passes import merge_passes, place_pass2
from .published.quantizer import adopt, release
from .quantizer import VQHfQuantizer, register

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
