"""Tokens as integers of 8 bits on a GPU, in the order of a product (w4a8_inputs.cu):
of a tensor, or of RMSNorm and of a gated MLP's product, which are not written as floats then.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...codegen.families import w4a8 as choose_w4a8
from ...codegen.jit.kernel_store import default_store
from ...codegen.jit.launch import LoadedKernel
from ...codegen.plan import Dtype, Plan
from ...codegen.w4a8_plan import Source
from ...errors import VQFormatError
from .linear.dequantize import DTYPES, on_device

_TOKEN = 8  # bytes of a token's scale and sum
_TILE = 64  # tokens that a product reads together at most: there is room for whole tiles


class W4A8InputsArguments(ctypes.Structure):
    """struct Arguments of kernels/cuda/w4a8/w4a8_inputs.cu."""

    _fields_ = [*((name, ctypes.c_void_p) for name in ("x", "other", "numbers", "token")),
                ("tokens", ctypes.c_int32), ("eps", ctypes.c_float),
                ("early", ctypes.c_int32)]  # fmt: skip


@dataclass(frozen=True)
class Rounded:
    """Tokens as a product reads them.

    Args:
        memory: uint8, the numbers, then scale and sum of each token.
        token_at: where the latter begin, in bytes.
        tokens: how many there are.
        columns: of each.
        swizzled: whether the order is that of w4a8_wgmma.cu.
    """

    memory: Tensor
    token_at: int
    tokens: int
    columns: int
    swizzled: bool

    @property
    def addresses(self) -> tuple[int, int]:
        """Of the numbers, and of scales and sums."""
        start = self.memory.data_ptr()
        return start, start + self.token_at


@functools.cache  # problems share plans
def kernel(plan: Plan, arguments: type[ctypes.Structure], ordinal: int) -> LoadedKernel:
    """A plan's kernel on a GPU, loaded."""
    return LoadedKernel(plan, arguments, ordinal, default_store())


def prepare(
    dtype: Dtype, columns: int, swizzled: bool, ordinal: int, source: Source = Source.TOKENS
) -> LoadedKernel:
    """The kernel that rounds tokens of so many numbers."""
    plan = choose_w4a8.inputs_plan(dtype, columns, swizzled, source)
    return kernel(plan, W4A8InputsArguments, ordinal)


def rounded(
    run: LoadedKernel, x: Tensor, other: Tensor | None = None, eps: float = 0.0, early: bool = False
) -> Rounded:
    """The tokens of x [..., columns] by a kernel of `prepare`.

    Args:
        run: of a plan for rows as long as those of x.
        x: tokens, or what they are made of.
        other: weight [columns] of a norm, or up, like x; None where x is tokens.
        eps: of a norm.
        early: let the next kernel begin before this one has waited for those in front of it: it is
            the product, of weights that nobody wrote.

    Raises:
        VQFormatError: `other` is not of that shape, or not of the dtype of x, or not where x is.
    """
    plan: Any = run.plan
    if other is not None:
        shape = x.shape if plan.source is Source.GATED else x.shape[-1:]
        if (other.shape, other.dtype, other.device) != (shape, x.dtype, x.device):
            raise VQFormatError(
                f"{plan.source.value} of {x.dtype} {list(x.shape)} on {x.device} got {other.dtype} "
                f"{list(other.shape)} on {other.device}."
            )
    x, other = aligned(x.contiguous()), None if other is None else aligned(other.contiguous())
    tokens = x.numel() // plan.columns
    token_at = -(-tokens // _TILE) * _TILE * plan.padded
    memory = x.new_empty(token_at + tokens * _TOKEN, dtype=torch.uint8)
    found = Rounded(memory, token_at, tokens, plan.columns, plan.swizzled)
    # Of several tokens in fragments, blocks without one fill up the last eight.
    blocks = tokens if plan.swizzled or tokens == 1 else -(-tokens // 8) * 8
    run(
        blocks, torch._C._cuda_getCurrentRawStream(x.get_device()), x.data_ptr(),
        None if other is None else other.data_ptr(), *found.addresses, tokens, eps, early,
        dependent=True,
    )  # fmt: skip
    return found


def aligned(tensor: Tensor) -> Tensor:
    """The tensor where kernels may read it, 16 bytes at a time."""
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def tokens(swizzled: bool, x: Tensor) -> Rounded:
    """x [..., columns], rounded."""
    return _made(Source.TOKENS, swizzled, x, None, 0.0)


def norm(swizzled: bool, x: Tensor, weight: Tensor, eps: float) -> Rounded:
    """RMSNorm of x [..., columns], rounded; `weight` [columns] has the dtype of x."""
    return _made(Source.NORM, swizzled, x, weight, eps)


def gated(swizzled: bool, gate: Tensor, up: Tensor) -> Rounded:
    """SiLU(gate) * up, rounded; both are [..., columns]."""
    return _made(Source.GATED, swizzled, gate, up, 0.0)


def _made(source: Source, swizzled: bool, x: Tensor, other: Tensor | None, eps: float) -> Rounded:
    ordinal = x.get_device()
    with on_device(ordinal):
        run = prepare(DTYPES[x.dtype], x.shape[-1], swizzled, ordinal, source)
        return rounded(run, x, other, eps)
