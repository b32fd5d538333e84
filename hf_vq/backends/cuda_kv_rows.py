"""The rows that hold and read keys and values as codes on a GPU, and what they need.

What runs them is imported when a tensor on a GPU asks for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..formats.scheme import VQScheme
from ..ops import dispatch
from ..ops.layout import ROWS
from ..ops.library import parse
from .cuda import needs


def accepts_integers(problem: dispatch.Problem) -> str | None:
    """None if there is a kernel that decodes rows of integers, else the reason why not."""
    from ..codegen.choose_prefill import decodable_kv

    scheme = VQScheme.parse(problem.scheme)
    return decodable_kv(scheme, problem.n) if scheme.has_zero else "rows have no zero"


def accepts_append(problem: dispatch.Problem) -> str | None:
    """None if there is a kernel for the codes of keys and values, else the reason why not."""
    from ..codegen.choose_append import appendable
    from ..codegen.plan import Dtype

    if problem.dtype not in {dtype.value for dtype in Dtype}:
        return f"numbers are {problem.dtype}"
    if problem.layout != ROWS:
        return f"codes lie in {problem.layout!r}, not {ROWS!r}"
    return appendable(VQScheme.parse(problem.scheme), problem.k)


def accepts_append_paged(problem: dispatch.Problem) -> str | None:
    """None if there is a kernel that writes codes to pages, else the reason why not."""
    if not VQScheme.parse(problem.scheme).has_scale:
        return "codebooks per channel group have no pages"
    return _paged(problem) or accepts_append(problem._replace(layout=ROWS))


def accepts_attention_paged(problem: dispatch.Problem) -> str | None:
    """None if there is a kernel that attends to codes in pages, else the reason why not."""
    return _paged(problem) or accepts_attention(problem)


def _paged(problem: dispatch.Problem) -> str | None:
    from ..codegen.attention_plan import PAGE

    return (
        f"pages of {problem.page} tokens, not of a multiple of {PAGE}"
        if problem.page % PAGE
        else None
    )


def accepts_store(problem: dispatch.Problem) -> str | None:
    """None if there is a kernel for a step of a static cache, else the reason why not."""
    from ..codegen.choose_append import appendable
    from ..codegen.plan import Dtype

    if problem.dtype not in {dtype.value for dtype in Dtype}:
        return f"numbers are {problem.dtype}"
    keys, values = map(parse, problem.scheme.split())
    return appendable(keys, problem.k) or appendable(values, problem.value_dim)


def accepts_attention(problem: dispatch.Problem) -> str | None:
    """None if there is a kernel that attends to the codes, else the reason why not."""
    from ..codegen.choose_attention import MOST_QUERIES, attendable, misfit
    from ..codegen.device import device_arch

    if problem.dtype not in ("float16", "bfloat16"):
        return f"queries are {problem.dtype}"
    if problem.tokens > MOST_QUERIES:
        return f"{problem.tokens} queries: codes are decoded for them once"
    if problem.layout not in ("", "rows rows"):
        return f"codes lie in {problem.layout!r}"
    keys, values = map(VQScheme.parse, problem.scheme.split())
    return (
        attendable(keys, problem.k, "keys")
        or attendable(values, problem.value_dim, "values")
        or misfit(
            keys, values, problem.k, problem.value_dim, device_arch(torch.cuda.current_device())
        )
    )


def _prefill(*arguments: Any) -> Tensor:
    from . import cuda_prefill

    return cuda_prefill.attention(*arguments)


def _attention(*arguments: Any) -> Tensor:
    from . import cuda_attention

    return cuda_attention.attention(*arguments)


def _attention_static(*arguments: Any) -> Tensor:
    from . import cuda_attention

    return cuda_attention.attention_static(*arguments)


def _attention_paged(*arguments: Any) -> Tensor:
    from . import cuda_attention

    return cuda_attention.attention_paged(*arguments)


def _append(*arguments: Any) -> None:
    from . import cuda_append

    cuda_append.append(*arguments)


def _append_paged(*arguments: Any) -> None:
    from . import cuda_append

    cuda_append.append_paged(*arguments)


def _store(*arguments: Any) -> None:
    from . import cuda_store

    cuda_store.store(*arguments)


def _decode_integers(codes: Tensor, codebook: Tensor, scale: Tensor, *more: Any) -> Tensor:
    from . import cuda_prefill

    *_, scheme, length = more
    stored = codes.reshape(1, 1, -1, codes.shape[-1]), scale.reshape(1, 1, -1, scale.shape[-1])
    with torch.cuda.device(codes.device):
        rows = cuda_prefill.decode(*stored, codebook, None, scheme, length, torch.float32)
    return rows.view(*codes.shape[:-1], length)


def register() -> None:
    """Add the rows to the top of the dispatch table."""
    rows = (
        dispatch.Kernel("cuda.attention_prefill", "attention", _prefill, "cuda", needs),
        dispatch.Kernel("cuda.vq_append", "append", _append, "cuda", needs, accepts_append),
        dispatch.Kernel("cuda.vq_store", "store", _store, "cuda", needs, accepts_store),
        dispatch.Kernel(
            "cuda.vq_attention", "attention", _attention, "cuda", needs, accepts_attention
        ),
        dispatch.Kernel(
            "cuda.vq_attention",
            "attention_static",
            _attention_static,
            "cuda",
            needs,
            accepts_attention,
        ),
        dispatch.Kernel(
            "cuda.vq_append", "append_paged", _append_paged, "cuda", needs, accepts_append_paged
        ),
        dispatch.Kernel(
            "cuda.vq_attention",
            "attention_paged",
            _attention_paged,
            "cuda",
            needs,
            accepts_attention_paged,
        ),
        dispatch.Kernel(
            "cuda.decode_integers", "decode", _decode_integers, "cuda", needs, accepts_integers
        ),
    )
    for row in rows:
        dispatch.register(row, first=True)
