"""What the CUDA kernels of W4A8 layers support, as the dispatch table asks: None, or why not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ... import dispatch
from ...errors import VQSchemeError
from ...ops import w4a8
from .. import refusals
from . import devices

if TYPE_CHECKING:
    from ...codegen.families.w4a8 import W4A8Problem


def linear(problem: dispatch.W4A8LinearProblem) -> str | None:
    """Whether w4a8.cu, for any number of tokens, multiplies."""
    from ...codegen.families.w4a8 import choose, multipliable, token_bucket

    reason = (
        refusals.dtype(problem.dtype, refusals.HALVES)
        or multipliable(problem.in_features)
        or devices.several_kinds()
    )
    if reason:
        return reason
    try:
        asked = _asked(problem, token_bucket(problem.tokens))
    except VQSchemeError as error:
        return str(error)
    return refusals.NO_PLAN if choose(asked) is None else None


def wide_linear(problem: dispatch.W4A8LinearProblem) -> str | None:
    """Whether w4a8_wgmma.cu, for many tokens on Hopper, multiplies."""
    from ...codegen.families.w4a8_wgmma import FEWEST_TOKENS, choose, token_bucket, wide
    from ...codegen.jit.device import device_arch

    reason = (
        wide(device_arch(torch.cuda.current_device()))
        or linear(problem)
        or refusals.few_tokens(problem.tokens, FEWEST_TOKENS)
    )
    if reason:
        return reason
    asked = _asked(problem, token_bucket(problem.tokens))
    return refusals.NO_PLAN if choose(asked) is None else None


def _asked(problem: dispatch.W4A8LinearProblem, tokens: int) -> W4A8Problem:
    from ...codegen.families.w4a8 import W4A8Problem
    from ...codegen.jit.device import device_arch
    from ...codegen.plan import Dtype

    scheme, dtype = w4a8.parse(problem.scheme), Dtype(problem.dtype)
    group = scheme.group and scheme.group_of(problem.in_features)
    arch = device_arch(torch.cuda.current_device())
    return W4A8Problem(group, tokens, problem.out_features, problem.in_features, dtype, dtype, arch)
