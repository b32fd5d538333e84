"""`hf_vq::input_gradient`: dL/dx = dL/dy W of y = W x + b, on the codes of W.

It is an op of its own so that a device may multiply in the dtype that it is fast in, and without
the weight as float32; and so that a compiled backward pass does not look inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, ops
from torch.library import register_autograd

from .. import dispatch
from ..formats.stored_weight import FLAT, SCHEMA, StoredWeight
from .codes import run_decode
from .library import define, is_plain_eager, library, name_of, parse, without_autocast
from .stored_gradients import gradients_of_stored


def reference(grad: Tensor, weight: StoredWeight) -> Tensor:
    """dL/dx [..., in] of dL/dy `grad` [..., out], in float32."""
    return (grad.float() @ run_decode(weight)).to(grad.dtype)


def run(grad: Tensor, weight: StoredWeight) -> Tensor:
    """dL/dx by the entry that the table chooses, without torch's dispatcher."""
    out_features = grad.shape[-1]
    tokens = dispatch.bucket(grad.numel() // max(out_features, 1))
    problem = dispatch.InputGradientProblem(
        grad.device.type, name_of(grad.dtype), weight.scheme.spec(), tokens, out_features,
        weight.in_features,
    )  # fmt: skip
    with without_autocast(grad.device):
        found: Tensor = dispatch.select(problem).run(grad, weight)
    return found


class OfFrozenWeight(torch.autograd.Function):
    """y = W x + b, whose only gradient is that of x. It saves what the op saves, and takes less of
    the host's time than the op's way through torch's dispatcher."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, f: Callable[..., Tensor], weight: StoredWeight, bias: Tensor | None
    ) -> Tensor:
        """y = f(x, weight, bias)."""
        ctx.save_for_backward(*weight.tensors)
        ctx.scheme, ctx.length = weight.scheme, weight.in_features
        return f(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """dL/dx, itself differentiable where that is asked for."""
        stored = ctx.saved_tensors
        if is_plain_eager(grad):
            found = run(grad, StoredWeight.of_flat(stored, ctx.scheme, ctx.length))
        else:
            found = ops.hf_vq.input_gradient(grad, *stored, ctx.scheme.spec(), ctx.length)
        return found, None, None, None


def _input_gradient(grad: Tensor, *arguments: Any) -> Tensor:
    *stored, spec, length = arguments
    return run(grad, StoredWeight.of_flat(stored, parse(spec), length))


def _fake(grad: Tensor, *arguments: Any) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], arguments[-1])


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad, *stored, scheme, _ = inputs
    trains = any(tensor is not None and tensor.requires_grad for tensor in stored)
    ctx.save_for_backward(grad if trains else None, *stored)
    ctx.scheme = scheme


def _backward(ctx: Any, moved: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of second order: the product is linear in dL/dy and in W."""
    grad, *stored = ctx.saved_tensors
    needed = ctx.needs_input_grad
    again = ops.hf_vq.linear(moved, *stored, None, ctx.scheme) if needed[0] else None
    grads = gradients_of_stored(grad, moved, stored, ctx.scheme, needed[1 : 1 + FLAT])
    return again, *grads, None, None


define("input_gradient", f"(Tensor grad, {SCHEMA}, str scheme, int length) -> Tensor",
       _input_gradient, _fake)  # fmt: skip
register_autograd("hf_vq::input_gradient", _backward, setup_context=_save_for_backward, lib=library)
