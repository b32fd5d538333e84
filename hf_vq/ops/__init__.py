"""The contract: schemas of `torch.ops.hf_vq.*`, and their reference."""

from .codes import (
    decode_kv,
    decode_weight,
    encode_kv,
    encode_weight,
    look_up,
    rotate,
    rotate_weight,
    round_weight,
)
from .kv import KVCacheView, KVSide
from .kv_ops import kv_append, kv_attention
from .library import is_plain_eager
from .linear import BoundLinear, linear
from .published import decode_published, published_linear
from .w4a8 import w4a8_linear

__all__ = [
    "BoundLinear",
    "KVCacheView",
    "KVSide",
    "decode_kv",
    "decode_published",
    "decode_weight",
    "encode_kv",
    "encode_weight",
    "is_plain_eager",
    "kv_append",
    "kv_attention",
    "linear",
    "look_up",
    "published_linear",
    "rotate",
    "rotate_weight",
    "round_weight",
    "w4a8_linear",
]
