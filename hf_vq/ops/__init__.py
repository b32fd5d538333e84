"""The contract: schemas of `torch.ops.hf_vq.*`, and their reference."""

from .codes import append_kv, decode_kv, decode_weight, encode_kv, encode_weight, rotate
from .library import only_result
from .linear import eager_linear, linear
from .published import decode_published, published_linear
from .w4a8 import w4a8_linear

__all__ = [
    "append_kv",
    "decode_kv",
    "decode_published",
    "decode_weight",
    "eager_linear",
    "encode_kv",
    "encode_weight",
    "linear",
    "only_result",
    "published_linear",
    "rotate",
    "w4a8_linear",
]
