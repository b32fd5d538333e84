"""What the CUDA kernels of a KV cache support, as the dispatch table asks: None, or why not."""

from __future__ import annotations

import torch

from .... import dispatch
from ....formats.scheme import VQScheme
from ....ops.layout import ROWS
from ... import refusals

AnyAttentionProblem = (
    dispatch.AttentionProblem | dispatch.StaticAttentionProblem | dispatch.PagedAttentionProblem
)


def decode_integers(problem: dispatch.DecodeProblem) -> str | None:
    """Whether rows of integers with a zero are decoded."""
    from ....codegen.families.kv_prefill import decodable_kv

    scheme = VQScheme.parse(problem.scheme)
    return decodable_kv(scheme, problem.length) if scheme.has_zero else "rows have no zero"


def append(problem: dispatch.AppendProblem) -> str | None:
    """Whether keys and values are encoded."""
    reason = refusals.dtype(problem.dtype, refusals.FLOATS, "numbers")
    if reason is None and problem.layout != ROWS:
        return f"codes lie in {problem.layout!r}, not {ROWS!r}"
    return reason or _appendable(problem.scheme, problem.head_dim)


def append_paged(problem: dispatch.PagedAppendProblem) -> str | None:
    """Whether keys and values are encoded into pages."""
    if not VQScheme.parse(problem.scheme).has_scale:
        return "codebooks per channel group have no pages"
    return (
        _pages(problem.page_size)
        or refusals.dtype(problem.dtype, refusals.FLOATS, "numbers")
        or _appendable(problem.scheme, problem.head_dim)
    )


def store(problem: dispatch.StoreProblem) -> str | None:
    """Whether a step of a static cache is written."""
    return (
        refusals.dtype(problem.dtype, refusals.FLOATS, "numbers")
        or _appendable(problem.key_scheme, problem.head_dim)
        or _appendable(problem.value_scheme, problem.value_dim)
    )


def attention(problem: dispatch.AttentionProblem | dispatch.StaticAttentionProblem) -> str | None:
    """Whether attention.cu reads the codes."""
    from ....codegen.families.kv_attention import MOST_QUERIES

    reason = refusals.dtype(problem.dtype, refusals.HALVES, "queries")
    if reason:
        return reason
    if problem.queries > MOST_QUERIES:
        return f"{problem.queries} queries: codes are decoded for them once"
    layouts = problem.key_layout, problem.value_layout
    if layouts not in (("", ""), (ROWS, ROWS)):
        return f"codes lie in {' '.join(layouts)!r}"
    return _attendable(problem, problem.value_dim)


def attention_paged(problem: dispatch.PagedAttentionProblem) -> str | None:
    """Whether attention.cu reads the codes in pages."""
    return (
        _pages(problem.page_size)
        or refusals.dtype(problem.dtype, refusals.HALVES, "queries")
        or _attendable(problem, problem.head_dim)
    )


def _appendable(scheme: str, dim: int) -> str | None:
    from ....codegen.families.kv_append import appendable

    return appendable(VQScheme.parse(scheme), dim)


def _attendable(problem: AnyAttentionProblem, value_dim: int) -> str | None:
    from ....codegen.families.kv_attention import attendable, misfit
    from ....codegen.jit.device import device_arch

    keys, values = VQScheme.parse(problem.key_scheme), VQScheme.parse(problem.value_scheme)
    return (
        attendable(keys, problem.head_dim, "keys")
        or attendable(values, value_dim, "values")
        or misfit(
            keys, values, problem.head_dim, value_dim, device_arch(torch.cuda.current_device())
        )
    )


def _pages(size: int) -> str | None:
    from ....codegen.attention_plan import PAGE

    return f"pages of {size} tokens, not of a multiple of {PAGE}" if size % PAGE else None
