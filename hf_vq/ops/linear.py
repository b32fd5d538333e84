"""`hf_vq::linear`: y = W x + b on the codes of W, differentiable with respect to x and to the
floats that W is stored as."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import dispatch, env, patches
from ..formats.scheme import VQScheme
from ..formats.stored_weight import FLAT, SCHEMA, Pass, StoredWeight, flat
from . import horizontal_fusion, input_gradient
from .library import (
    define,
    described_problem,
    is_plain_eager,
    library,
    parse,
    trains_at_most_input,
)
from .stored_gradients import gradients_of_stored

_MOST_SHAPES = 64  # of inputs, that a layer remembers: prompts have many lengths

Kernel = tuple["dispatch.Bound | None", Callable[..., Tensor]]
"""The shorter way of an entry, if it has one for a problem, and its `run`."""


def linear(
    x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None, scheme: VQScheme | str
) -> Tensor:
    """y = W x + b.

    Args:
        x: [..., in_features], any float dtype.
        tensors: stored tensors of W (keys of `formats.tensor_specs`).
        bias: [out_features] or None.
        scheme: of W, or its spec string.

    Returns:
        [..., out_features] of the dtype of `x`. Gradients flow to `x`, `bias`, scales and
        codebooks.
    """
    spec = scheme if isinstance(scheme, str) else scheme.spec()
    stored = flat(tensors)
    if trains_at_most_input(x, *stored, bias):
        weight = StoredWeight.of_flat(stored, parse(spec), x.shape[-1])
        if not (torch.is_grad_enabled() and x.requires_grad):
            return run_linear(x, weight, bias)
        frozen: Callable[..., Tensor] = input_gradient.OfFrozenWeight.apply
        return frozen(x, run_linear, weight, bias)
    y: Tensor = torch.ops.hf_vq.linear.default(x, *stored, bias, spec)
    return y


def run_linear(x: Tensor, weight: StoredWeight, bias: Tensor | None) -> Tensor:
    """y = W x + b by the entry that the table chooses, without torch's dispatcher."""
    codes, spec = weight.first.codes, weight.scheme.spec()
    one_pass = weight.residual is None and codes.ndim == 2
    bound, run = _kernel(
        x.device, x.dtype, x.shape, spec, codes.shape[0], one_pass, env.BACKEND.get()
    )
    y = None if bound is None else bound(x, *weight.first, bias)
    return run(x, weight, bias) if y is None else y


@dispatch.cached_by_table
def _kernel(
    device: torch.device,
    dtype: torch.dtype,
    shape: torch.Size,
    spec: str,
    out_features: int,
    one_pass: bool,
    forced: str,
) -> Kernel:
    """`forced` is HF_VQ_BACKEND, on which the answer depends."""
    problem = described_problem("linear", device, dtype, shape, spec, out_features)
    short = one_pass and dtype.is_floating_point
    return dispatch.bind(problem) if short else None, dispatch.select(problem).run


class BoundLinear:
    """y = W x + b of one layer of one pass: a kernel is found once for each kind of input.

    What is bound keeps no tensor of the layer. Those of a call are passed to it, because a layer's
    tensors may be moved, replaced or written to at any time; kernels look at what they get. A copy
    of a layer binds its own kernels.

    Args:
        spec: of the layer's scheme.
    """

    def __init__(self, spec: str) -> None:
        self._spec = spec
        self._kernels: dict[tuple[Any, ...], Kernel] = {}
        dispatch.clear_with_table(self)

    def __reduce__(self) -> Any:
        return BoundLinear, (self._spec,)

    def cache_clear(self) -> None:
        """Ask the table anew."""
        self._kernels.clear()

    def __call__(self, x: Tensor, first: Pass | tuple[Any, ...], bias: Tensor | None) -> Any:
        """y; None where a compiler, a tracer or a gradient has to see the op, and for inputs or
        codes that `linear` has to look at first: integers, and codes that are no matrix.

        Args:
            first: the tensors of a `Pass`, in its order; a plain tuple takes less time to make.
        """
        codes, codebook, scale, rotation = first
        if not is_plain_eager(x, codebook, scale, bias):
            return None
        # A layer that is sharded later has fewer codes.
        key = x.shape, x.dtype, x.device, codes.size(0), env.BACKEND.get()
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = self._bind(key, codes)
            if kernel is None:
                return None
        bound, run = kernel
        if bound is not None:
            y = bound(x, codes, codebook, scale, rotation, bias)
            if y is not None:
                return y
        weight = StoredWeight(Pass(*first), None, parse(self._spec), x.shape[-1])
        return run(x, weight, bias)

    def _bind(self, key: tuple[Any, ...], codes: Tensor) -> Kernel | None:
        shape, dtype, device, out_features, forced = key
        if codes.ndim != 2 or not dtype.is_floating_point:
            return None
        if len(self._kernels) >= _MOST_SHAPES:
            self._kernels.clear()
        found = _kernel(device, dtype, shape, self._spec, out_features, True, forced)
        self._kernels[key] = found
        return found


def _linear(x: Tensor, *arguments: Any) -> Tensor:
    *stored, bias, spec = arguments
    return run_linear(x, StoredWeight.of_flat(stored, parse(spec), x.shape[-1]), bias)


def _fake_linear(x: Tensor, codes: Tensor, *arguments: Any) -> Tensor:
    patches.apply(patches.TRACE)
    return x.new_empty(*x.shape[:-1], codes.shape[0])


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *stored, bias, scheme = inputs
    trains = any(tensor is not None and tensor.requires_grad for tensor in stored)
    ctx.save_for_backward(x if trains else None, *stored)
    ctx.scheme, ctx.length = scheme, x.shape[-1]
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, *stored = ctx.saved_tensors
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = torch.ops.hf_vq.input_gradient(grad, *stored, ctx.scheme, ctx.length)
    grads = gradients_of_stored(grad, x, stored, ctx.scheme, ctx.needs_input_grad[1 : 1 + FLAT])
    if ctx.needs_input_grad[1 + FLAT]:
        grad_bias = grad.float().reshape(-1, grad.shape[-1]).sum(0).to(ctx.bias_dtype)
    return grad_x, *grads, grad_bias, None


define(
    "linear",
    f"(Tensor x, {SCHEMA}, Tensor? bias, str scheme) -> Tensor",
    _linear,
    _fake_linear,
)
torch.library.register_autograd(
    "hf_vq::linear", _backward, setup_context=_save_for_backward, lib=library
)
horizontal_fusion.register(
    torch.ops.hf_vq.linear.default,
    torch.ops.hf_vq.linears.default,
    (*range(1, 1 + len(Pass._fields)), 1 + FLAT),
    horizontal_fusion.worth_while,
)
