"""The KV cache as codes: `VQCache`, its layers, and what they hand to attention."""

from .cache import VQCache
from .codebooks import KVCodebooks
from .handle import VQHandle, attend
from .layer import VQCacheLayer
from .sliding import VQSlidingCacheLayer

__all__ = ["KVCodebooks", "VQCache", "VQCacheLayer", "VQHandle", "VQSlidingCacheLayer", "attend"]
