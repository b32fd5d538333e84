"""What every device can run: the reference implementations, at the end of the table."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..dispatch import Implementation, PublishedLinearProblem
from ..ops import fused_inputs, input_gradient, published, w4a8
from ..ops.kv import PAGED, STATIC, KVCacheView
from ..ops.reference import codes as reference
from ..ops.reference import encode_weight, key_means, round_weight
from ..ops.reference import kv_attention as attention_reference
from ..ops.reference import kv_static as static_reference


def _decoded(problem: PublishedLinearProblem) -> str:
    return (
        "the weight is decoded at every call; `hf-vq convert --requantize vq-4` makes a model that "
        "has kernels"
    )


def _kv_append(
    key: Tensor | None, value: Tensor | None, view: KVCacheView, slot_mapping: Any
) -> None:
    run = static_reference if view.memory == STATIC else reference
    run.kv_append(key, value, view, slot_mapping)


def _kv_attention(query: Tensor, view: KVCacheView, *options: Any) -> Tensor:
    if view.memory == STATIC:
        return static_reference.attention(query, view, *options)
    paged = view.memory == PAGED
    run = attention_reference.attention_paged if paged else attention_reference.attention
    return run(query, view, *options)


LINEAR = Implementation(reference.linear, is_slow=lambda problem: True)
INPUT_GRADIENT = Implementation(input_gradient.reference)
W4A8_LINEAR = Implementation(
    w4a8.reference, fused=fused_inputs.reference, is_slow=lambda problem: True
)
PUBLISHED_LINEAR = Implementation(published.reference, note=_decoded, is_slow=lambda problem: True)
DECODE = Implementation(reference.decode)
ENCODE = Implementation(reference.encode)
ENCODE_WEIGHT = Implementation(encode_weight.encode_weight)
ROUND_WEIGHT = Implementation(round_weight.round_weight)
ROTATE = Implementation(reference.rotate)
KV_APPEND = Implementation(_kv_append)
KV_ATTENTION = Implementation(_kv_attention)
KEY_MEANS = Implementation(key_means.prompt_means)
KEY_SMOOTHING = Implementation(key_means.prompt_smoothing)
