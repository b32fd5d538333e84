"""The contract: schemas of `torch.ops.hf_vq.*`, their reference, and the dispatch table."""

from .codes import append_kv, decode_kv, decode_weight, encode_kv, encode_weight, rotate
from .dispatch import Kernel, Problem, Verdict, explain, register, rows, select
from .library import only_result
from .linear import direct_linear, linear
from .published import decode_published, published_linear
from .w4a8 import w4a8_linear

__all__ = [
    "Kernel",
    "Problem",
    "Verdict",
    "append_kv",
    "decode_kv",
    "decode_published",
    "decode_weight",
    "direct_linear",
    "encode_kv",
    "encode_weight",
    "explain",
    "linear",
    "only_result",
    "published_linear",
    "register",
    "rotate",
    "rows",
    "select",
    "w4a8_linear",
]
