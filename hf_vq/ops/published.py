"""`hf_vq::published_linear`: y = W x + b with W as another project published it.

Differentiable with respect to x."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from ..errors import VQFormatError
from ..formats.published import Layout, layout_from_dict
from ..transforms import rotate
from .library import define, library, linear_problem, only_result


def published_linear(
    x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None, layout: str, rows: int
) -> Tensor:
    """y = W x + b.

    Args:
        x: [..., in_features], any float dtype.
        tensors: stored tensors of W (keys of `Layout.own`).
        bias: [rows] or None.
        layout: of W, as `Layout.spec` says it.
        rows: out_features.

    Returns:
        [..., rows] of the dtype of `x`. Gradients flow to `x` and `bias`.
    """
    keys, stored = list(tensors), list(tensors.values())
    if only_result(x, bias, *stored):
        return _published_linear(x, stored, keys, bias, layout, rows)
    y: Tensor = torch.ops.hf_vq.published_linear.default(x, stored, keys, bias, layout, rows)
    return y


def decode_published(
    tensors: Mapping[str, Tensor], layout: Layout, rows: int, in_features: int
) -> Tensor:
    """The dense weight float32 [rows, in_features].

    Args:
        tensors: stored tensors by key (`Layout.own`).
    """
    named = {s: tensors[layout.key(s)] for s in layout.suffixes if layout.key(s) in tensors}
    weight, rotated = layout.decode(named, rows, in_features), layout.rotation()
    return weight if rotated is None else rotate(weight, rotated, inverse=True)


def reference(
    x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None, layout: Layout, rows: int
) -> Tensor:
    """The published formula, rounded to the dtype of x, and a product in it."""
    weight = decode_published(tensors, layout, rows, x.shape[-1]).to(x.dtype)
    return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))


def checked(
    x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None, layout: Layout, rows: int
) -> dict[str, Tensor]:
    """The stored tensors in their dtypes, for a kernel: it would read what is not there.

    Raises:
        VQFormatError: a tensor has another shape, or lies on another device than x.
    """
    held = {}
    for key, shape, dtype in _expected(layout, rows, x.shape[-1]):
        tensor = tensors[key]
        if tensor.shape != shape:
            raise VQFormatError(
                f"{key} of a [{rows}, {x.shape[-1]}] layer of {layout.name()} is "
                f"{list(tensor.shape)}, expected {list(shape)}."
            )
        held[key] = tensor.to(dtype)
    for name, tensor in (*held.items(), *([] if bias is None else [("bias", bias)])):
        if tensor.device != x.device:
            raise VQFormatError(
                f"the input is on {x.device}, but {name} of the layer on {tensor.device}: move the "
                "layer, or let accelerate do it."
            )
    return held


@functools.lru_cache(maxsize=1024)
def _expected(
    layout: Layout, rows: int, columns: int
) -> tuple[tuple[str, torch.Size, torch.dtype], ...]:
    found = layout.own(rows, columns)
    return tuple((key, torch.Size(spec.shape), spec.dtype) for key, spec in found.items())


@functools.lru_cache(maxsize=1024)
def parse(spec: str) -> Layout:
    """The layout of `Layout.spec`."""
    return layout_from_dict(json.loads(spec))


def _published_linear(
    x: Tensor, stored: list[Tensor], keys: list[str], bias: Tensor | None, layout: str, rows: int
) -> Tensor:
    entry = dispatch.select(linear_problem("published_linear", x, layout, rows))
    y: Tensor = entry.run(x, dict(zip(keys, stored, strict=True)), bias, parse(layout), rows)
    return y


def _fake(
    x: Tensor, stored: list[Tensor], keys: list[str], bias: Tensor | None, layout: str, rows: int
) -> Tensor:
    return x.new_empty(*x.shape[:-1], rows)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, stored, ctx.keys, bias, ctx.layout, ctx.rows = inputs
    ctx.save_for_backward(*stored)
    ctx.length, ctx.dtype = x.shape[-1], x.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        tensors = dict(zip(ctx.keys, ctx.saved_tensors, strict=True))
        weight = decode_published(tensors, parse(ctx.layout), ctx.rows, ctx.length)
        grad_x = (grad.float() @ weight).to(ctx.dtype)
    if ctx.needs_input_grad[3]:
        grad_bias = grad.float().reshape(-1, grad.shape[-1]).sum(0).to(ctx.bias_dtype)
    nothing = [None] * len(ctx.keys)
    return grad_x, nothing, None, grad_bias, None, None


define(
    "published_linear",
    "(Tensor x, Tensor[] stored, str[] keys, Tensor? bias, str layout, int rows) -> Tensor",
    _published_linear,
    _fake,
)
torch.library.register_autograd(
    "hf_vq::published_linear", _backward, setup_context=_save_for_backward, lib=library
)
