"""All that knows how Transformers loads, saves and shares models."""

from .allocate import allocate_kv
from .calibrate import calibrate_kv
from .config import VQConfig
from .explain import explain
from .graphs import capture
from .published import adopt, release
from .quantizer import VQHfQuantizer, register
from .smooth import smooth_attention

__all__ = [
    "VQConfig",
    "VQHfQuantizer",
    "adopt",
    "allocate_kv",
    "calibrate_kv",
    "capture",
    "explain",
    "register",
    "release",
    "smooth_attention",
]
