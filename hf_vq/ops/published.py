"""`hf_vq::published_linear`: y = W x + b with W as another project published it.

Differentiable with respect to x."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import dispatch
from ..errors import VQFormatError
from ..formats.published import Layout, layout_from_dict
from ..transforms import rotate
from .library import define, is_plain_eager, library, linear_problem


class PublishedWeight(NamedTuple):
    """A matrix as another project published it.

    Args:
        tensors: stored tensors by key (`Layout.own`).
        layout: how they store it.
    """

    tensors: Mapping[str, Tensor]
    layout: Layout
    out_features: int
    in_features: int

    def decode(self) -> Tensor:
        """The dense weight float32 [out_features, in_features]."""
        return decode_published(self.tensors, self.layout, self.out_features, self.in_features)


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
    if is_plain_eager(x, bias, *stored):
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


def reference(x: Tensor, weight: PublishedWeight, bias: Tensor | None) -> Tensor:
    """The published formula, rounded to the dtype of x, and a product in it."""
    dense = weight.decode().to(x.dtype)
    return torch.nn.functional.linear(x, dense, None if bias is None else bias.to(x.dtype))


def checked(
    weight: PublishedWeight, bias: Tensor | None, device: torch.device
) -> dict[str, Tensor]:
    """The stored tensors in their dtypes, for a kernel: it would read what is not there.

    Raises:
        VQFormatError: a tensor has another shape, or lies on another device than the input.
    """
    ready, size = {}, (weight.out_features, weight.in_features)
    for key, shape, dtype in _expected(weight.layout, *size):
        tensor = weight.tensors[key]
        if tensor.shape != shape:
            raise VQFormatError(
                f"{key} of a {list(size)} layer of {weight.layout.name()} is "
                f"{list(tensor.shape)}, expected {list(shape)}."
            )
        ready[key] = tensor.to(dtype)
    for name, tensor in (*ready.items(), *([] if bias is None else [("bias", bias)])):
        if tensor.device != device:
            raise VQFormatError(
                f"the input is on {device}, but {name} of the layer on {tensor.device}: move the "
                "layer, or let accelerate do it."
            )
    return ready


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
    tensors = dict(zip(keys, stored, strict=True))
    y: Tensor = entry.run(x, PublishedWeight(tensors, parse(layout), rows, x.shape[-1]), bias)
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
