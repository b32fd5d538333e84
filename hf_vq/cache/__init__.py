"""The KV cache as codes: `VQCache`, its layers, and what they hand to attention."""

from .codebooks import KVCodebooks
from .key_means import see_queries
from .layer import VQCacheLayer
from .lazy_kv import CompiledKV, LazyKV, attend, is_coded
from .sliding_layer import VQSlidingCacheLayer
from .static_layer import VQStaticLayer
from .vq_cache import VQCache

__all__ = [
    "CompiledKV",
    "KVCodebooks",
    "LazyKV",
    "VQCache",
    "VQCacheLayer",
    "VQSlidingCacheLayer",
    "VQStaticLayer",
    "attend",
    "is_coded",
    "see_queries",
]
