"""`w4a8_linear` on a GPU: weights of 4 bits times tokens that are rounded to 8, by generated CUDA
kernels, with the same numbers as the reference.

One token is rounded by every block of the product for itself (w4a8.cu). More are rounded once
(w4a8_inputs.cu), into the order in which the product reads them: that of w4a8.cu, or on Hopper for
many tokens of w4a8_wgmma.cu.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...codegen.families import w4a8 as choose_w4a8
from ...codegen.families import w4a8_wgmma as choose_w4a8_wide
from ...codegen.families.w4a8 import W4A8Problem
from ...codegen.jit.device import device_arch
from ...codegen.jit.launch import LoadedKernel
from ...codegen.w4a8_plan import W4A8Plan, W4A8WidePlan
from ...dispatch import Fused, Implementation
from ...errors import VQBackendError, VQFormatError
from ...formats.qoq import QoQScheme
from ...formats.stored_weight import W4A8Weight
from ...ops import w4a8
from . import w4a8_inputs, w4a8_supports
from .bound_weight import bind_weight
from .linear.dequantize import DTYPES, on_device
from .w4a8_inputs import Rounded, aligned

_NAMES = ("codes", "scale", "zero", "step", "x", "token", "bias", "y")
_POINTERS: list[tuple[str, Any]] = [(name, ctypes.c_void_p) for name in _NAMES]


class W4A8Arguments(ctypes.Structure):
    """struct Arguments of kernels/cuda/w4a8/w4a8.cu."""

    _fields_ = [*_POINTERS, ("rows", ctypes.c_int32), ("tokens", ctypes.c_int32)]


class W4A8WideArguments(ctypes.Structure):
    """struct Arguments of kernels/cuda/w4a8/w4a8_wgmma.cu."""

    _fields_ = [*W4A8Arguments._fields_, ("columns", ctypes.c_int32)]


@dataclass(frozen=True)
class Launch:
    """How a layer runs a plan: its kernels, loaded.

    Args:
        plan: of the product.
        kernel: of the product.
        inputs: rounds tokens before it; None where the product does.
    """

    plan: W4A8Plan | W4A8WidePlan
    kernel: LoadedKernel
    inputs: LoadedKernel | None

    def blocks(self, rows: int, tokens: int, ordinal: int) -> int:
        """Of the product."""
        if isinstance(self.plan, W4A8Plan):
            return choose_w4a8.blocks(self.plan, rows, tokens)
        return choose_w4a8_wide.blocks(self.plan, rows, tokens, device_arch(ordinal))


def prepare(plan: W4A8Plan | W4A8WidePlan, columns: int, ordinal: int) -> Launch:
    """The kernels of a plan for rows of so many weights."""
    wide = isinstance(plan, W4A8WidePlan)
    kernel = w4a8_inputs.kernel(plan, W4A8WideArguments if wide else W4A8Arguments, ordinal)
    inputs = None
    if isinstance(plan, W4A8WidePlan) or not plan.rounds:
        inputs = w4a8_inputs.prepare(plan.dtype, columns, wide, ordinal)
    return Launch(plan, kernel, inputs)


@functools.lru_cache(maxsize=4096)
def _prepared(
    scheme: QoQScheme,
    rows: int,
    columns: int,
    bucket: int,
    dtype: torch.dtype,
    bias: torch.dtype,
    ordinal: int,
    many: bool,
    rounded: bool,
) -> Launch:
    group = scheme.group and scheme.group_of(columns)
    arch = device_arch(ordinal)
    kinds = DTYPES[dtype], DTYPES[bias]
    problem = W4A8Problem(group, bucket, rows, columns, *kinds, arch, rounded)
    plan = choose_w4a8_wide.choose(problem) if many else choose_w4a8.choose(problem)
    if plan is None:
        raise VQBackendError(f"{scheme.spec()} has no kernel for {problem}.")
    return prepare(plan, columns, ordinal)


def linear(x: Tensor, weight: W4A8Weight, bias: Tensor | None) -> Tensor:
    """y = W round(x) + b for any number of tokens, the same numbers as `ops.w4a8.reference`."""
    return multiply(False, None, x, weight, bias)


def linear_many(x: Tensor, weight: W4A8Weight, bias: Tensor | None) -> Tensor:
    """The same for many tokens, on Hopper."""
    return multiply(True, None, x, weight, bias)


def multiply(
    many: bool, inputs: Rounded | None, x: Tensor, weight: W4A8Weight, bias: Tensor | None
) -> Tensor:
    """The same; of inputs that are rounded already, `x` is asked for its shape and dtype only."""
    rows, columns = weight.codes.shape[0], weight.in_features
    y = torch.empty((*x.shape[:-1], rows), dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    ordinal, tokens = x.get_device(), x.numel() // columns
    bucket = (choose_w4a8_wide if many else choose_w4a8).token_bucket(tokens)
    if bias is not None and bias.dtype not in DTYPES:
        bias = bias.float()
    added = x.dtype if bias is None else bias.dtype
    with on_device(ordinal):
        launch = _prepared(
            weight.scheme, rows, columns, bucket, x.dtype, added, ordinal, many, inputs is not None
        )
        run(launch, x if inputs is None else inputs, weight, bias, y)
    return y


def run(
    launch: Launch,
    x: Tensor | Rounded,
    weight: W4A8Weight,
    bias: Tensor | None,
    y: Tensor,
    blocks: int = 0,
) -> None:
    """To `y`, by a launch that is given.

    Args:
        x: tokens, or as the launch reads them.
        blocks: of the product, if others than usual; fewer only of `W4A8WidePlan`.

    Raises:
        VQFormatError: tensors do not belong together, or are not where y is.
    """
    rows, ordinal, device = weight.codes.shape[0], y.get_device(), y.device
    columns, tokens = weight.in_features, y.numel() // rows
    found = w4a8.checked(weight, device).tensors
    held = [None if tensor is None else aligned(tensor) for tensor in found]
    if bias is not None:
        if bias.shape != (rows,) or bias.device != device:
            raise VQFormatError(
                f"a bias of shape {list(bias.shape)} on {bias.device} does not suit {rows} outputs "
                f"on {device}."
            )
        bias = bias.contiguous()
    stream = torch._C._cuda_getCurrentRawStream(ordinal)
    stored = [tensor for tensor in weight.tensors if tensor is not None]
    ready = [tensor for tensor in held if tensor is not None]
    # A copy was written just now.
    early = all(given is one for given, one in zip(stored, ready, strict=True))
    early = early and bind_weight(weight.codes).settled(
        stored if bias is None else [*stored, bias], stream
    )
    if isinstance(x, Tensor) and launch.inputs is not None:
        x = w4a8_inputs.rounded(launch.inputs, x, early=early)
        early = True  # else what came before is complete when the product begins
    if isinstance(x, Tensor):
        x = aligned(x.contiguous())
    inputs = x.addresses if isinstance(x, Rounded) else (x.data_ptr(), None)
    sizes = (rows, tokens) if isinstance(launch.plan, W4A8Plan) else (rows, tokens, columns)
    launch.kernel(
        blocks or launch.blocks(rows, tokens, ordinal), stream,
        *(None if tensor is None else tensor.data_ptr() for tensor in held),
        *inputs, None if bias is None else bias.data_ptr(), y.data_ptr(), *sizes, dependent=early,
    )  # fmt: skip


def _fused(many: bool) -> Fused:
    inputs, of_kernel = w4a8_inputs, functools.partial
    return Fused(
        of_kernel(inputs.tokens, many), of_kernel(inputs.norm, many),
        of_kernel(inputs.gated, many), of_kernel(multiply, many),
    )  # fmt: skip


LINEAR = Implementation(linear, w4a8_supports.linear, fused=_fused(False))
WIDE_LINEAR = Implementation(linear_many, w4a8_supports.wide_linear, fused=_fused(True))
