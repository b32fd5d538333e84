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

from .. import dispatch
from ..formats.scheme import VQScheme

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


def linear_problem(op: str, x: Tensor, spec: str, out_features: int) -> dispatch.AnyLinearProblem:
    """The problem of a product of `x` [..., in_features] with one weight, stored as `spec` says.

    Args:
        op: `linear`, `published_linear` or `w4a8_linear`.
    """
    return described_problem(op, x.device, x.dtype, x.shape, spec, out_features)


@lru_cache(maxsize=4096)  # every layer asks this for every token
def described_problem(
    op: str,
    device: torch.device,
    dtype: torch.dtype,
    shape: torch.Size,
    spec: str,
    out_features: int,
) -> dispatch.AnyLinearProblem:
    """`linear_problem` of an input that is described."""
    in_features = shape[-1]
    tokens = dispatch.bucket(shape.numel() // max(in_features, 1))
    problem: dispatch.AnyLinearProblem = dispatch.PROBLEMS[op](
        device.type, name_of(dtype), spec, tokens, out_features, in_features
    )
    return problem


def rows_of(x: Tensor) -> int:
    """Rows of `x` [..., n], as a problem counts them: rounded up to a power of two."""
    return dispatch.bucket(x.numel() // max(x.shape[-1], 1))


def name_of(dtype: torch.dtype) -> str:
    """`bfloat16` of `torch.bfloat16`."""
    return str(dtype)[6:]


@lru_cache(maxsize=256)
def attention_problem(
    device: torch.device,
    dtype: torch.dtype,
    key_scheme: str,
    value_scheme: str,
    head_dim: int,
    value_dim: int,
    queries: int = 1,
    length: int = 0,
    key_layout: str = "",
    value_layout: str = "",
) -> dispatch.AttentionProblem:
    """The problem of attention: `queries` of each row over a cache of `length` tokens.

    Args:
        device: of the query.
        dtype: of the query.
        key_layout: with `value_layout`, empty to ask what a new cache's should be.
    """
    return dispatch.AttentionProblem(
        device.type, name_of(dtype), key_scheme, value_scheme,
        dispatch.bucket(queries), dispatch.bucket(length), head_dim, value_dim,
        key_layout, value_layout,
    )  # fmt: skip


parse = VQScheme.parse
