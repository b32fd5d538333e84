"""All that knows how Transformers loads, saves and shares models."""

from .allocate import allocate_kv
from .calibrate import calibrate_kv
from .config import VQConfig
from .explain import explain
from .graphs import capture
from .quantizer import VQHfQuantizer, register
from .smooth import smooth_attention

__all__ = [
    "VQConfig",
    "VQHfQuantizer",
    "allocate_kv",
    "calibrate_kv",
    "capture",
    "explain",
    "register",
    "smooth_attention",
]
