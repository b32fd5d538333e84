"""Plans of dequantize_kv.cu and softmax_merge.cu, the kernels around attention over decoded tokens.

Pure functions, no GPU. A problem has one plan: reading and writing rows is the bottleneck.
"""

from __future__ import annotations

import functools

from ...formats.scheme import VQScheme
from ..kv_plan import DecodeKVPlan, MergePlan
from ..plan import Dtype

_THREADS, _RESIDENT, _STEPS = 256, 4, 4
_LARGEST_TABLE = 48 << 10  # bytes; what every kernel may ask for, and four blocks of Hopper have
_TOKENS, _TOKENS_OF_LEARNED = 128, 1024  # of a block, whose table is filled first
_LARGEST_HEAD = 2048


@functools.lru_cache(maxsize=256)  # asked for every part
def decodable_kv(scheme: VQScheme, head_dim: int) -> str | None:
    """None if a plan decodes keys or values of this scheme, else the reason why not."""
    x, bits = scheme.vector_size, scheme.entry_bits
    if scheme.codebook == "tile" or scheme.lattice:
        return "KV codes have a codebook for all rows, or one per channel group"
    if scheme.mode != "unbiased":
        return f"mode {scheme.mode!r} is not computed by kernels"
    if scheme.streams != 1 or scheme.largest_entry:
        return "KV codes have one stage of fp16 entries"
    if scheme.has_scale and scheme.group(head_dim) != head_dim:
        return "several scales per token"
    unit = DecodeKVPlan.UNIT
    if unit % x or bits % x or head_dim % unit or head_dim > _LARGEST_HEAD:
        return f"codes of {unit} channels are not whole bytes, or head_dim {head_dim} too large"
    if not _slice(scheme, head_dim):
        return "its codebooks do not fit into shared memory"
    return None


def _slice(scheme: VQScheme, head_dim: int) -> int:
    """Channels whose entries fit into shared memory, the most that divide a head; 0 = none."""
    learned, x = scheme.codebook == "channel_group", scheme.vector_size
    most = _LARGEST_TABLE // (2 * x * scheme.entries)  # tables
    if not learned:
        return head_dim if most else 0
    sizes = range(DecodeKVPlan.UNIT, head_dim + 1, DecodeKVPlan.UNIT)
    return max((n for n in sizes if head_dim % n == 0 and n // x <= most), default=0)


def decode_kv_plan(scheme: VQScheme, head_dim: int, out: Dtype) -> DecodeKVPlan:
    """The plan of keys or values that are `decodable_kv`."""
    learned = scheme.codebook == "channel_group"
    return DecodeKVPlan(
        _THREADS, _RESIDENT, out, scheme.vector_size, scheme.entry_bits, head_dim,
        _slice(scheme, head_dim), _TOKENS_OF_LEARNED if learned else _TOKENS, _STEPS, learned,
        scheme.has_scale, scheme.has_zero,
    )  # fmt: skip


def blocks(plan: DecodeKVPlan, heads: int, tokens: int) -> int:
    """Blocks of a launch for `tokens` tokens of each of `heads` heads (rows times KV heads)."""
    return heads * (plan.dim // plan.slice) * -(-tokens // plan.tokens)


def merge_plan(scheme: VQScheme, head_dim: int, dtype: Dtype) -> MergePlan:
    """The plan that merges parts of which some are codes of `scheme`, values of `head_dim`."""
    return MergePlan(_THREADS, _RESIDENT, dtype, head_dim, scheme.block(head_dim))
