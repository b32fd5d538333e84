"""The KV cache as codes: `VQCache`, its layers, and what they hand to attention."""

from .cache import VQCache
from .handle import VQHandle, attend
from .layer import VQCacheLayer
from .sliding import VQSlidingCacheLayer

__all__ = ["VQCache", "VQCacheLayer", "VQHandle", "VQSlidingCacheLayer", "attend"]
