"""The KV cache as codes: `VQCache`, its layers, and what they hand to attention."""

from .codebooks import KVCodebooks
from .layer import VQCacheLayer
from .lazy_kv import VQHandle, attend
from .lazy_static_kv import StaticHandle, attend_static
from .sliding_layer import VQSlidingCacheLayer
from .static_layer import VQStaticLayer
from .vq_cache import VQCache

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
