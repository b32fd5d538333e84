"""`w4a8_linear` on a GPU: weights of 4 bits times tokens that are rounded to 8, by generated CUDA
kernels, with the same numbers as the reference.

One token is rounded by every block of the product for itself (w4a8.cu). More are rounded once
(w4a8_inputs.cu), into the order in which the product reads them: that of w4a8.cu, or on Hopper for
many tokens of w4a8_wide.cu.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..codegen import choose_w4a8, choose_w4a8_wide
from ..codegen.choose_w4a8 import W4A8Problem
from ..codegen.device import device_arch
from ..codegen.launch import Kernel
from ..codegen.plan import Plan
from ..codegen.store import default_store
from ..codegen.w4a8_plan import CHUNK, W4A8Plan, W4A8WidePlan
from ..errors import VQBackendError, VQFormatError
from ..formats.qoq import QoQScheme
from ..ops import w4a8
from .cuda_linear import DTYPES, on_device
from .cuda_overlap import Launches

_TOKEN = 8  # bytes of a token's scale and sum
_NAMES = ("codes", "scale", "zero", "step", "x", "token", "bias", "y")
_POINTERS: list[tuple[str, Any]] = [(name, ctypes.c_void_p) for name in _NAMES]


class W4A8Arguments(ctypes.Structure):
    """struct Arguments of kernels/cuda/w4a8.cu."""

    _fields_ = [*_POINTERS, ("rows", ctypes.c_int32), ("tokens", ctypes.c_int32)]


class W4A8WideArguments(ctypes.Structure):
    """struct Arguments of kernels/cuda/w4a8_wide.cu."""

    _fields_ = [*W4A8Arguments._fields_, ("columns", ctypes.c_int32)]


class W4A8InputsArguments(ctypes.Structure):
    """struct Arguments of kernels/cuda/w4a8_inputs.cu."""

    _fields_ = [*((name, ctypes.c_void_p) for name in ("x", "numbers", "token")),
                ("tokens", ctypes.c_int32)]  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """How a layer runs a plan: its kernels, loaded.

    Args:
        plan: of the product.
        kernel: of the product.
        inputs: rounds tokens before it; None where the product does.
    """

    plan: W4A8Plan | W4A8WidePlan
    kernel: Kernel
    inputs: Kernel | None

    def blocks(self, rows: int, tokens: int, ordinal: int) -> int:
        """Of the product."""
        if isinstance(self.plan, W4A8Plan):
            return choose_w4a8.blocks(self.plan, rows, tokens)
        return choose_w4a8_wide.blocks(self.plan, rows, tokens, device_arch(ordinal))

    def padded(self, tokens: int) -> int:
        """Tokens that there is room for in the order of the product."""
        tile = 8 * self.plan.token_tiles if isinstance(self.plan, W4A8Plan) else 8
        return -(-tokens // tile) * tile


@functools.cache  # problems share plans
def _kernel(plan: Plan, arguments: type[ctypes.Structure], ordinal: int) -> Kernel:
    return Kernel(plan, arguments, ordinal, default_store())


def prepare(plan: W4A8Plan | W4A8WidePlan, columns: int, ordinal: int) -> Launch:
    """The kernels of a plan for rows of so many weights."""
    wide = isinstance(plan, W4A8WidePlan)
    kernel = _kernel(plan, W4A8WideArguments if wide else W4A8Arguments, ordinal)
    inputs = None
    if isinstance(plan, W4A8WidePlan) or not plan.rounds:
        rounding = choose_w4a8.inputs_plan(plan.dtype, columns, wide)
        inputs = _kernel(rounding, W4A8InputsArguments, ordinal)
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
) -> Launch:
    group = scheme.group and scheme.group_of(columns)
    arch = device_arch(ordinal)
    problem = W4A8Problem(group, bucket, rows, columns, DTYPES[dtype], DTYPES[bias], arch)
    plan = choose_w4a8_wide.choose(problem) if many else choose_w4a8.choose(problem)
    if plan is None:
        raise VQBackendError(f"{scheme.spec()} has no kernel for {problem}.")
    return prepare(plan, columns, ordinal)


_launches = Launches()


def linear(*arguments: Any) -> Tensor:
    """y = W round(x) + b for any number of tokens, the same numbers as `ops.w4a8.reference`."""
    return _linear(False, *arguments)


def linear_many(*arguments: Any) -> Tensor:
    """The same for many tokens, on Hopper."""
    return _linear(True, *arguments)


def _linear(
    many: bool,
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor,
    step: Tensor | None,
    bias: Tensor | None,
    scheme: QoQScheme,
) -> Tensor:
    rows, columns = codes.shape[0], x.shape[-1]
    y = x.new_empty((*x.shape[:-1], rows))
    if not y.numel():
        return y
    ordinal, tokens = x.get_device(), x.numel() // columns
    bucket = (choose_w4a8_wide if many else choose_w4a8).token_bucket(tokens)
    if bias is not None and bias.dtype not in DTYPES:
        bias = bias.float()
    added = x.dtype if bias is None else bias.dtype
    with on_device(ordinal):
        launch = _prepared(scheme, rows, columns, bucket, x.dtype, added, ordinal, many)
        run(launch, x, codes, scale, zero, step, bias, scheme, y)
    return y


def _aligned(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def run(
    launch: Launch,
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor,
    step: Tensor | None,
    bias: Tensor | None,
    scheme: QoQScheme,
    y: Tensor,
    blocks: int = 0,
) -> None:
    """To `y`, by a launch that is given.

    Args:
        blocks: of the product, if others than usual; fewer only of `W4A8WidePlan` without a split.

    Raises:
        VQFormatError: tensors do not belong together, or are not where x is.
    """
    rows, columns, ordinal = codes.shape[0], x.shape[-1], x.get_device()
    tokens = x.numel() // columns
    found = w4a8.checked(codes, scale, zero, step, scheme, columns, x.device)
    held = [None if tensor is None else _aligned(tensor) for tensor in found]
    if bias is not None:
        if bias.shape != (rows,) or bias.device != x.device:
            raise VQFormatError(
                f"a bias of shape {list(bias.shape)} on {bias.device} does not suit {rows} outputs "
                f"on {x.device}."
            )
        bias = bias.contiguous()
    x = _aligned(x.contiguous())
    stream = torch._C._cuda_getCurrentRawStream(ordinal)
    inputs, token, before = x, None, launch.inputs
    if before is not None:
        nbytes = launch.padded(tokens) * -(-columns // CHUNK) * CHUNK
        inputs = x.new_empty(nbytes + tokens * _TOKEN, dtype=torch.uint8)
        token = inputs.data_ptr() + nbytes
        before(tokens, stream, x.data_ptr(), inputs.data_ptr(), token, tokens, dependent=True)
    early = True  # what came before inputs are rounded is complete when the product begins
    if before is None:
        stored = [tensor for tensor in (codes, scale, zero, step) if tensor is not None]
        ready = [tensor for tensor in held if tensor is not None]
        # A copy was written just now.
        kept = all(given is one for given, one in zip(stored, ready, strict=True))
        early = kept and _launches.settled(stored, stream)
    sizes = (rows, tokens) if isinstance(launch.plan, W4A8Plan) else (rows, tokens, columns)
    launch.kernel(
        blocks or launch.blocks(rows, tokens, ordinal), stream,
        *(None if tensor is None else tensor.data_ptr() for tensor in held),
        inputs.data_ptr(), token, None if bias is None else bias.data_ptr(), y.data_ptr(), *sizes,
        dependent=early,
    )  # fmt: skip
