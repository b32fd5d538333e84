"""What the CUDA kernels of a KV cache support, as the dispatch table asks: None, or why not."""

from __future__ import annotations

import torch

from .... import dispatch
from ....formats.scheme import VQScheme
from ....ops.kv import PAGED, STATIC
from ....ops.layout import ROWS
from ... import refusals


def decode_integers(problem: dispatch.DecodeProblem) -> str | None:
    """Whether rows of integers with a zero are decoded."""
    from ....codegen.families.kv_prefill import decodable_kv

    scheme = VQScheme.parse(problem.scheme)
    return decodable_kv(scheme, problem.length) if scheme.has_zero else "rows have no zero"


def append(problem: dispatch.KVAppendProblem) -> str | None:
    """Whether keys, or values, are encoded: of a growing cache in rows, or into pages."""
    if problem.memory == STATIC:
        return "a static cache is written by one kernel"
    ((scheme, dim, layout),) = problem.sides
    if problem.memory == PAGED and not VQScheme.parse(scheme).has_scale:
        return "codebooks per channel group have no pages"
    reason = refusals.dtype(problem.dtype, refusals.FLOATS, "numbers")
    if reason is None and layout != ROWS:
        return f"codes lie in {layout!r}, not {ROWS!r}"
    if problem.memory == PAGED:
        reason = reason or refusals.rotary(problem)
    return reason or _pages(problem.page_size) or _appendable(scheme, dim)


def store(problem: dispatch.KVAppendProblem) -> str | None:
    """Whether a step of a static cache is written."""
    if problem.memory != STATIC:
        return "the memory of the cache is not static"
    return (
        refusals.dtype(problem.dtype, refusals.FLOATS, "numbers")
        or _appendable(problem.key_scheme, problem.head_dim)
        or _appendable(problem.value_scheme, problem.value_dim)
    )


def attention(problem: dispatch.KVAttentionProblem) -> str | None:
    """Whether attention.cu reads the codes."""
    from ....codegen.families.kv_attention import MOST_QUERIES

    reason = refusals.dtype(problem.dtype, refusals.HALVES, "queries")
    if reason:
        return reason
    if problem.memory != PAGED and problem.queries > MOST_QUERIES:
        return f"{problem.queries} queries: codes are decoded for them once"
    layouts = problem.key_layout, problem.value_layout
    if layouts not in (("", ""), (ROWS, ROWS)):
        return f"codes lie in {' '.join(layouts)!r}"
    return _pages(problem.page_size) or _attendable(problem, problem.value_dim)


def _appendable(scheme: str, dim: int) -> str | None:
    from ....codegen.families.kv_append import appendable

    return appendable(VQScheme.parse(scheme), dim)


def _attendable(problem: dispatch.KVAttentionProblem, value_dim: int) -> str | None:
    from ....codegen.families.kv_attention import attendable, misfit
    from ....codegen.jit.device import device_arch

    keys, values = VQScheme.parse(problem.key_scheme), VQScheme.parse(problem.value_scheme)
    return (
        attendable(keys, problem.head_dim, "keys")
        or attendable(values, value_dim, "values")
        or misfit(
            keys,
            values,
            problem.head_dim,
            value_dim,
            device_arch(torch.cuda.current_device()),
            problem.rotary,
        )
    )


def _pages(size: int) -> str | None:
    from ....codegen.attention_plan import PAGE

    return f"pages of {size} tokens, not of a multiple of {PAGE}" if size % PAGE else None
