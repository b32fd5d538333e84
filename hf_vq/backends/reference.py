"""What every device can run: the reference implementations, at the end of the table."""

from __future__ import annotations

from ..dispatch import Implementation, PublishedLinearProblem
from ..ops import fused_inputs, published, w4a8
from ..ops.reference import codes as reference
from ..ops.reference import kv_attention as attention_reference
from ..ops.reference import kv_static as static_reference


def _decoded(problem: PublishedLinearProblem) -> str:
    return (
        "the weight is decoded at every call; `hf-vq convert --requantize vq-4` makes a model that "
        "has kernels"
    )


LINEAR = Implementation(reference.linear)
W4A8_LINEAR = Implementation(w4a8.reference, fused=fused_inputs.reference)
PUBLISHED_LINEAR = Implementation(published.reference, note=_decoded)
DECODE = Implementation(reference.decode)
ENCODE = Implementation(reference.encode)
ROTATE = Implementation(reference.rotate)
APPEND = Implementation(reference.append)
PAGED_APPEND = Implementation(reference.append_paged)
STORE = Implementation(static_reference.store)
ATTENTION = Implementation(attention_reference.attention)
STATIC_ATTENTION = Implementation(static_reference.attention_static)
PAGED_ATTENTION = Implementation(attention_reference.attention_paged)
