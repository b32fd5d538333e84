"""The `hf_vq::` namespace of torch.library, where every op's schema is defined once.

`define` + `impl` and never `@custom_op`, which costs several microseconds more per call.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import Parameter

from .. import dispatch, env
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


def is_plain_eager(x: Tensor, *others: Tensor | None) -> bool:
    """Whether a call of an op is eager and nothing follows it but its result: then the way through
    torch's dispatcher and back into Python may be left out.

    False while a compiler, a tracer, a mode, a transform or forward-mode AD looks on, or a gradient
    will be asked of `x` or of one of the `others`.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return False
    return trains_at_most_input(x, *others)


def trains_at_most_input(x: Tensor, *others: Tensor | None) -> bool:
    """Whether a call of an op is eager and nothing follows it but its result, and a gradient that
    may be asked of `x` (`is_plain_eager`)."""
    if is_compiling() or type(x) is not Tensor or _modes() or _transforms() or _traces():
        return False
    if x.is_meta or forward_ad._current_level >= 0:
        return False
    grad = torch.is_grad_enabled()
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


def entry_of_rows(op: str, x: Tensor, scheme: VQScheme, length: int, *more: int) -> dispatch.Entry:
    """The entry that runs an op on rows, found once for a shape.

    Args:
        op: `rotate`, `encode`, `encode_weight`, `round_weight` or `decode`.
        x: [..., n], the rows, or their codes.
        scheme: how rows are stored.
        length: numbers of a row.
        more: further fields of the op's problem.
    """
    return _entry_of_rows(
        op, x.device, x.dtype, x.shape, scheme.key, length, more, env.BACKEND.get()
    )


@dispatch.cached_by_table
def _entry_of_rows(
    op: str,
    device: torch.device,
    dtype: torch.dtype,
    shape: torch.Size,
    spec: str,
    length: int,
    more: tuple[int, ...],
    forced: str,
) -> dispatch.Entry:
    problem = dispatch.PROBLEMS[op]
    kind = (name_of(dtype),) if "dtype" in problem._fields else ()
    rows = dispatch.bucket(shape.numel() // max(shape[-1], 1))
    return dispatch.select(problem(device.type, *kind, spec, rows, length, *more))


def name_of(dtype: torch.dtype) -> str:
    """`bfloat16` of `torch.bfloat16`."""
    return str(dtype)[6:]


@lru_cache(maxsize=1024)
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
    memory: str = "growing",
    page_size: int = 0,
    rotary: bool = False,
) -> dispatch.KVAttentionProblem:
    """The problem of attention: `queries` of each row over a cache of `length` tokens.

    Args:
        device: of the query.
        dtype: of the query.
        key_layout: with `value_layout`, empty to ask what a new cache's should be.
    """
    return dispatch.KVAttentionProblem(
        device.type, name_of(dtype), key_scheme, value_scheme,
        dispatch.bucket(queries), dispatch.bucket(length), head_dim, value_dim,
        key_layout, value_layout, memory, page_size, rotary,
    )  # fmt: skip


@lru_cache(maxsize=1024)  # every layer asks this twice for every token
def append_problem(
    device: torch.device,
    dtype: torch.dtype,
    scheme: str,
    tokens: int,
    head_dim: int,
    layout: str,
    memory: str = "growing",
    page_size: int = 0,
    rotary: bool = False,
) -> dispatch.KVAppendProblem:
    """The problem of encoding `tokens` of each row of the keys, or of the values."""
    return dispatch.KVAppendProblem(
        device.type, name_of(dtype), scheme, "", dispatch.bucket(tokens), head_dim, 0, layout, "",
        memory, page_size, rotary,
    )  # fmt: skip


def static_append_problem(
    device: torch.device,
    dtype: torch.dtype,
    schemes: tuple[str, ...],
    tokens: int,
    dims: tuple[int, ...],
    layouts: tuple[str, ...],
    rotary: bool = False,
) -> dispatch.KVAppendProblem:
    """The problem of writing `tokens` of each row to a static cache; of keys and of values."""
    return dispatch.KVAppendProblem(
        device.type, name_of(dtype), schemes[0], schemes[1], dispatch.bucket(tokens), dims[0],
        dims[1], layouts[0], layouts[1], "static", rotary=rotary,
    )  # fmt: skip


_can_autocast = lru_cache(torch.amp.is_autocast_available)
_AS_IT_IS = nullcontext()


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on for a device."""
    kind = device.type
    return _can_autocast(kind) and torch.is_autocast_enabled(kind)


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Codes and scales are computed in float32, which autocast would quietly lower."""
    return torch.autocast(device.type, enabled=False) if autocasts(device) else _AS_IT_IS


parse = VQScheme.parse
