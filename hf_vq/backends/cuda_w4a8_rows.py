"""The rows that multiply integers of 4 and 8 bits on a GPU, and what they need.

What runs them (`cuda_w4a8`) is imported when a tensor on a GPU asks for it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import VQSchemeError
from ..ops import dispatch, w4a8
from . import cuda

if TYPE_CHECKING:
    from ..codegen.choose_w4a8 import W4A8Problem


def accepts(problem: dispatch.Problem) -> str | None:
    """None if the kernel for any number of tokens takes the problem, else the reason why not."""
    from ..codegen.choose_w4a8 import choose, multipliable, token_bucket

    if problem.dtype not in ("float16", "bfloat16"):
        return f"inputs are {problem.dtype}"
    reason = multipliable(problem.k)
    if reason:
        return reason
    if cuda.several_kinds():
        return "there are GPUs of several kinds"
    try:
        asked = _asked(problem, token_bucket(problem.tokens))
    except VQSchemeError as error:
        return str(error)
    return _NO_PLAN if choose(asked) is None else None


def accepts_many(problem: dispatch.Problem) -> str | None:
    """None if the kernel for many tokens takes the problem, else the reason why not."""
    from ..codegen.choose_w4a8_wide import FEWEST_TOKENS, choose, token_bucket, wide
    from ..codegen.device import device_arch

    reason = wide(device_arch(torch.cuda.current_device())) or accepts(problem)
    if reason:
        return reason
    if problem.tokens < FEWEST_TOKENS:
        return f"{problem.tokens} tokens are few"
    asked = _asked(problem, token_bucket(problem.tokens))
    return _NO_PLAN if choose(asked) is None else None


_NO_PLAN = "no plan: shared memory or registers do not suffice"


def _asked(problem: dispatch.Problem, tokens: int) -> W4A8Problem:
    from ..codegen.choose_w4a8 import W4A8Problem
    from ..codegen.device import device_arch
    from ..codegen.plan import Dtype

    scheme, dtype = w4a8.parse(problem.scheme), Dtype(problem.dtype)
    group = scheme.group and scheme.group_of(problem.k)
    arch = device_arch(torch.cuda.current_device())
    return W4A8Problem(group, tokens, problem.n, problem.k, dtype, dtype, arch)


def _linear(*arguments: Any) -> Tensor:
    from . import cuda_w4a8

    return cuda_w4a8.linear(*arguments)


def _linear_many(*arguments: Any) -> Tensor:
    from . import cuda_w4a8

    return cuda_w4a8.linear_many(*arguments)


def _tokens(swizzled: bool, x: Tensor) -> Any:
    from . import cuda_w4a8_inputs

    return cuda_w4a8_inputs.tokens(swizzled, x)


def _norm(swizzled: bool, *arguments: Any) -> Any:
    from . import cuda_w4a8_inputs

    return cuda_w4a8_inputs.norm(swizzled, *arguments)


def _gated(swizzled: bool, *arguments: Any) -> Any:
    from . import cuda_w4a8_inputs

    return cuda_w4a8_inputs.gated(swizzled, *arguments)


def _multiply(many: bool, *arguments: Any) -> Tensor:
    from . import cuda_w4a8

    return cuda_w4a8.multiply(many, *arguments)


def _fused(many: bool) -> dispatch.Fused:
    return dispatch.Fused(*(partial(run, many) for run in (_tokens, _norm, _gated, _multiply)))


def register() -> None:
    """Add the rows to the top of the dispatch table."""
    op, needs = "w4a8_linear", cuda.needs
    for name, run, takes, many in (
        ("cuda.w4a8_linear", _linear, accepts, False),
        ("cuda.w4a8_wide", _linear_many, accepts_many, True),
    ):
        row = dispatch.Kernel(name, op, run, "cuda", needs, takes, fused=_fused(many))
        dispatch.register(row, first=True)
