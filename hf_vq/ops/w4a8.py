"""`hf_vq::w4a8_linear`: y = W x + b in integers, with W in QoQ's format and x rounded to 8 bits
(QServe, arXiv 2405.04532, section 5.2). Differentiable with respect to x and the
scales, as if x were not rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .. import dispatch, patches
from ..errors import VQFormatError
from ..formats import qoq
from ..formats.packing import unpack_bits
from ..formats.qoq import QoQScheme
from ..formats.stored_weight import W4A8_KEYS, W4A8_LISTS_SCHEMA, W4A8_SCHEMA, W4A8Weight
from . import horizontal_fusion
from .library import define, is_plain_eager, library, linear_problem
from .stored_gradients import weight_gradient

LARGEST = 127
SMALLEST = 1e-30
"""A token's largest number counts at least this much, so that its scale has an inverse."""

parse = lru_cache(maxsize=64)(QoQScheme.parse)


def w4a8_linear(x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None, spec: str) -> Tensor:
    """y = W round(x) + b.

    Args:
        x: [..., in_features], any float dtype. A token with NaN or infinity gives NaN.
        tensors: stored tensors of W (keys of `formats.qoq`).
        bias: [out_features] or None.
        spec: of the `QoQScheme`.

    Returns:
        [..., out_features] of the dtype of `x`. Gradients flow to `x`, `bias` and scales.
    """
    stored = tensors["codes"], tensors["scale"], tensors["zero"], tensors.get("step")
    if is_plain_eager(x, bias, *stored):
        return _run(x, W4A8Weight(*stored, parse(spec), x.shape[-1]), bias, spec)
    y: Tensor = torch.ops.hf_vq.w4a8_linear.default(x, *stored, bias, spec)
    return y


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """x ~ numbers * scale: each token [..., k] as integers from -127 to 127 and one scale.

    The scale is float32: it is not stored, and one of fp16 would be 2^-11 off and end at 65504. Its
    inverse is a true division, which torch makes of two tensors only.

    Returns:
        numbers int8 [..., k]; scale float32 [..., 1], NaN of a token that is not finite.
    """
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True)
    finite = largest.isfinite()
    largest = torch.where(finite, largest, torch.nan).clamp_min(SMALLEST)
    inverse = torch.full_like(largest, LARGEST) / largest
    numbers = torch.where(finite, x * inverse, 0).round()
    return numbers.to(torch.int8), largest * (1 / LARGEST)


def reference(x: Tensor, weight: W4A8Weight, bias: Tensor | None) -> Tensor:
    """y = W round(x) + b."""
    return product(*quantize_tokens(x), weight, bias, x.dtype)


def product(
    numbers: Tensor, size: Tensor, weight: W4A8Weight, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """One product of integers, exact in float64, and what is left of the formula after it:

    y = (<numbers, q> * scale - sum(numbers) * zero) * size + b                 without groups
    y = <numbers, q * step - zero> * scale * size + b                           size: of the token
    """
    codes, scale, zero, step = weight.tensors
    q, numbers = unpack_bits(codes, 4, numbers.shape[-1]), numbers.double()
    if step is not None:
        q = qoq.levels(q, {"step": step, "zero": zero})
    y = (numbers @ q.double().T) * scale.double()[:, 0]
    if step is None:
        y -= numbers.sum(-1, keepdim=True) * zero.double()[:, 0]
    y = y.float() * size
    return (y if bias is None else y + bias.float()).to(dtype)


def checked(weight: W4A8Weight, device: torch.device) -> W4A8Weight:
    """The weight with its tensors in their dtypes, side by side: a kernel would read what is not
    there.

    Raises:
        VQFormatError: they do not belong together, or are not on `device`.
    """
    scheme, rows, columns = weight.scheme, weight.codes.shape[0], weight.in_features
    expected = _expected(scheme, rows, columns)
    if (weight.step is None) != (expected[3] is None):
        needed = ", ".join(qoq.qoq_specs(scheme, rows, columns))
        raise VQFormatError(f"a layer of {scheme.spec()} has {needed}.")
    ready: list[Tensor | None] = []
    for key, tensor, spec in zip(W4A8_KEYS, weight.tensors, expected, strict=True):
        if tensor is None or spec is None:
            ready.append(None)
            continue
        shape, dtype = spec
        if tensor.shape != shape or tensor.device != device:
            raise VQFormatError(
                f"{key} of a [{rows}, {columns}] layer of {scheme.spec()} is {list(tensor.shape)} "
                f"on {tensor.device}, expected {list(shape)} on {device}."
            )
        same = tensor.dtype == dtype and tensor.is_contiguous()
        ready.append(tensor if same else tensor.to(dtype).contiguous())
    return W4A8Weight.of_flat(ready, scheme, columns)


@lru_cache(maxsize=1024)
def _expected(
    scheme: QoQScheme, rows: int, columns: int
) -> tuple[tuple[torch.Size, torch.dtype] | None, ...]:
    specs = qoq.qoq_specs(scheme, rows, columns)
    return tuple(
        (torch.Size(specs[key].shape), specs[key].dtype) if key in specs else None
        for key in W4A8_KEYS
    )


def _w4a8_linear(x: Tensor, *arguments: Any) -> Tensor:
    *stored, bias, spec = arguments
    return _run(x, W4A8Weight.of_flat(stored, parse(spec), x.shape[-1]), bias, spec)


def _run(x: Tensor, weight: W4A8Weight, bias: Tensor | None, spec: str) -> Tensor:
    entry = dispatch.select(linear_problem("w4a8_linear", x, spec, weight.codes.shape[0]))
    y: Tensor = entry.run(x, weight, bias)
    return y


def _w4a8_linears(x: Tensor, *arguments: Any) -> list[Tensor]:
    *lists, biases, spec = arguments
    each = list(zip(*lists, biases, strict=True))
    fused = _rounds_once(x, [len(codes) for codes, *_ in each], spec)
    if fused is None:
        return [_w4a8_linear(x, *one, spec) for one in each]
    rounded, scheme = fused.tokens(x), parse(spec)
    return [
        fused.linear(rounded, x, W4A8Weight.of_flat(stored, scheme, x.shape[-1]), bias)
        for *stored, bias in each
    ]


def _rounds_once(x: Tensor, rows: list[int], spec: str) -> dispatch.Fused | None:
    """How kernels of several weights take what is rounded once for all; None where one rounds for
    itself, or there is one token, which products round while their codes are on their way."""
    if x.numel() <= x.shape[-1]:
        return None
    problems = [linear_problem("w4a8_linear", x, spec, count) for count in rows]
    found = {dispatch.select(problem).implementation.fused for problem in problems}
    return found.pop() if len(found) == 1 else None


def _fake_linears(x: Tensor, codes: list[Tensor], *arguments: Any) -> list[Tensor]:
    return [x.new_empty(*x.shape[:-1], rows.shape[0]) for rows in codes]


def _fake(x: Tensor, codes: Tensor, *arguments: Any) -> Tensor:
    patches.apply(patches.TRACE)
    return x.new_empty(*x.shape[:-1], codes.shape[0])


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *stored, bias, ctx.spec = inputs
    ctx.save_for_backward(x if stored[1].requires_grad else None, *stored)
    ctx.length, ctx.dtype = x.shape[-1], x.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, *tensors = ctx.saved_tensors
    stored = dict(zip(W4A8_KEYS, tensors, strict=True))
    grad_x = grad_scale = grad_bias = None
    if ctx.needs_input_grad[0]:
        weight = qoq.decode(stored, parse(ctx.spec), ctx.length)
        grad_x = (grad.float() @ weight).to(ctx.dtype)
    if ctx.needs_input_grad[2]:
        codes = unpack_bits(stored["codes"], 4, ctx.length)
        integers = codes if stored["step"] is None else qoq.levels(codes, stored)
        grad_scale = (weight_gradient(grad, x) * integers).sum(1, keepdim=True)
        grad_scale = grad_scale.to(stored["scale"].dtype)
    if ctx.needs_input_grad[5]:
        grad_bias = grad.float().reshape(-1, grad.shape[-1]).sum(0).to(ctx.bias_dtype)
    return grad_x, None, grad_scale, None, None, grad_bias, None


define(
    "w4a8_linear",
    f"(Tensor x, {W4A8_SCHEMA}, Tensor? bias, str scheme) -> Tensor",
    _w4a8_linear,
    _fake,
)
torch.library.register_autograd(
    "hf_vq::w4a8_linear", _backward, setup_context=_save_for_backward, lib=library
)
# Made by `horizontal_fusion.fuse`, after autograd.
define(
    "w4a8_linears",
    f"(Tensor x, {W4A8_LISTS_SCHEMA}, Tensor?[] bias, str scheme) -> Tensor[]",
    _w4a8_linears,
    _fake_linears,
)
horizontal_fusion.register(
    torch.ops.hf_vq.w4a8_linear.default,
    torch.ops.hf_vq.w4a8_linears.default,
    (1, 2, 3, 4, 5),
    lambda x, rows, spec: _rounds_once(x, rows, spec) is not None,
)
