"""Plans of key_means.cu and key_smoothing.cu, by which a prompt decides how its keys are coded.

Pure functions, no GPU. A dtype has one plan, for all sizes: they run once per prompt and layer.
"""

from __future__ import annotations

from ..kv_plan import KeyMeansPlan, KeySmoothingPlan
from ..plan import Dtype

_THREADS, _RESIDENT = 256, 2
_PART, _MOST_PARTS = 64, 64  # tokens of a block; blocks of a head


def measurable(head_dim: int) -> str | None:
    """None if means of keys of `head_dim` numbers are measured, else the reason why not."""
    most = KeyMeansPlan.LARGEST_DIM
    return None if head_dim <= most else f"head_dim {head_dim} is more than {most}"


def smoothable(head_dim: int) -> str | None:
    """None if factors of keys of `head_dim` numbers are found, else the reason why not."""
    unit, most = KeySmoothingPlan.UNIT, KeySmoothingPlan.LARGEST_DIM
    if 0 < head_dim <= most and head_dim % unit == 0:
        return None
    return f"head_dim {head_dim} is no multiple of {unit} up to {most}"


def key_means_plan(dtype: Dtype) -> KeyMeansPlan:
    """The plan of keys of `dtype`."""
    return KeyMeansPlan(_THREADS, _RESIDENT, dtype)


def key_smoothing_plan(dtype: Dtype) -> KeySmoothingPlan:
    """The plan of queries and keys of `dtype`."""
    return KeySmoothingPlan(_THREADS, _RESIDENT, dtype)


def split(tokens: int) -> tuple[int, int]:
    """Blocks that share the tokens of a head, and tokens of each. It depends on nothing else, so
    that a sequence has the same sums in any batch."""
    each = _PART * max(1, -(-tokens // (_PART * _MOST_PARTS)))
    return -(-tokens // each), each
