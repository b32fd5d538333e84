"""The KV cache as codes: `VQCache`, its layers, and what they hand to attention."""

from .cache import VQCache
from .codebooks import KVCodebooks
from .handle import VQHandle, attend
from .layer import VQCacheLayer
from .sliding import VQSlidingCacheLayer
from .static import VQStaticLayer
from .static_handle import StaticHandle, attend_static

__all__ = [
    "KVCodebooks",
    "StaticHandle",
    "VQCache",
    "VQCacheLayer",
    "VQHandle",
    "VQSlidingCacheLayer",
    "VQStaticLayer",
    "attend",
    "attend_static",
]
