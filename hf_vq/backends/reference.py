"""The rows that every device can run: the reference implementations, at the end of the table."""

from __future__ import annotations

from ..ops import (
    attention_reference,
    dispatch,
    fused_inputs,
    published,
    reference,
    static_reference,
    w4a8,
)


def register() -> None:
    """Add the rows to the dispatch table."""
    for op, run in (
        ("linear", reference.linear),
        ("decode", reference.decode),
        ("encode", reference.encode),
        ("rotate", reference.rotate),
        ("append", reference.append),
        ("attention", attention_reference.attention),
        ("store", static_reference.store),
        ("attention_static", static_reference.attention_static),
        ("append_paged", reference.append_paged),
        ("attention_paged", attention_reference.attention_paged),
    ):
        dispatch.register(dispatch.Kernel("reference", op, run))
    dispatch.register(
        dispatch.Kernel("reference", "w4a8_linear", w4a8.reference, fused=fused_inputs.reference)
    )
    dispatch.register(
        dispatch.Kernel("reference", "published_linear", published.reference, remark=_decoded)
    )


def _decoded(problem: dispatch.Problem) -> str:
    return (
        "the weight is decoded at every call; `hf-vq convert --requantize vq-4` makes a model that "
        "has kernels"
    )
