"""The `hf_vq::` namespace of torch.library, where every op's schema is defined once.

`define` + `impl` and never `@custom_op`, which costs several microseconds more per call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import Parameter

from ..formats.scheme import VQScheme
from . import dispatch

library = torch.library.Library("hf_vq", "DEF")

_PLAIN = {Tensor, Parameter, type(None)}
# Not public: a torch without one of them is taken to be looking on always.
_modes, _transforms, _traces = (
    getattr(torch._C, name, lambda: True)
    for name in ("_len_torch_dispatch_stack", "_are_functorch_transforms_active", "_is_tracing")
)


def define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define `hf_vq::name` with its schema, its implementation (the dispatch) and its fake."""
    library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hf_vq::{name}", fake, lib=library)


def only_result(x: Tensor, *others: Tensor | None) -> bool:
    """Whether a call of an op is eager and nothing follows it but its result: then the way through
    torch's dispatcher and back into Python may be left out.

    False while a compiler, a tracer, a mode, a transform or forward-mode AD looks on, or a gradient
    will be asked of `x` or of one of the `others`.
    """
    if is_compiling() or type(x) is not Tensor or _modes() or _transforms() or _traces():
        return False
    if x.is_meta or forward_ad._current_level >= 0:
        return False
    grad = torch.is_grad_enabled()
    if grad and x.requires_grad:
        return False
    for y in others:  # a generator takes longer than all the rest
        if type(y) not in _PLAIN or (grad and y is not None and y.requires_grad):
            return False
    return True


def problem(op: str, x: Tensor, spec: str, n: int) -> dispatch.Problem:
    """The problem of an op whose input `x` is [..., k] and whose output has `n` features."""
    return problem_of(op, x.device, x.dtype, x.shape, spec, n)


@lru_cache(maxsize=4096)  # every layer asks this for every token
def problem_of(
    op: str, device: torch.device, dtype: torch.dtype, shape: torch.Size, spec: str, n: int
) -> dispatch.Problem:
    """`problem` of an input that is described."""
    k = shape[-1]
    tokens = dispatch.bucket(shape.numel() // max(k, 1))
    return dispatch.Problem(op, device.type, str(dtype)[6:], spec, tokens, n, k)


def attention_problem(
    query: torch.Tensor,
    key_scheme: str,
    value_scheme: str,
    head_dim: int,
    value_dim: int,
    *,
    queries: int = 1,
    length: int = 0,
    layout: str = "",
) -> dispatch.Problem:
    """The problem of attention: `queries` of each row over a cache of `length` tokens.

    Args:
        query: decides device and dtype.
        layout: of keys and of values; empty to ask what a new cache's should be.
    """
    return _attention_problem(
        query.device, query.dtype, f"{key_scheme} {value_scheme}",
        dispatch.bucket(queries), dispatch.bucket(length), head_dim, value_dim, layout,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _attention_problem(device: torch.device, dtype: torch.dtype, *asked: Any) -> dispatch.Problem:
    return dispatch.Problem("attention", device.type, str(dtype)[6:], *asked)


parse = VQScheme.parse
