"""`hf_vq::linear`: y = W x + b on the codes of W, differentiable with respect to x."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import dispatch, env, patches
from ..formats.scheme import VQScheme
from . import horizontal_fusion
from .codes import stored_arguments
from .library import define, described_problem, library, linear_problem, only_result, parse


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
        [..., out_features] of the dtype of `x`. Gradients flow to `x` and `bias`.
    """
    spec = scheme if isinstance(scheme, str) else scheme.spec()
    stored = stored_arguments(tensors)
    _, codebook, scale, _, _, codebook_2, scale_2, _ = stored
    alone = only_result(x, codebook, scale, codebook_2, scale_2, bias)
    run: Callable[..., Tensor] = _linear if alone else torch.ops.hf_vq.linear.default
    return run(x, *stored, bias, spec)


def eager_linear(
    x: Tensor,
    codes: Tensor,
    codebook: Tensor,
    scale: Tensor,
    rotation: Tensor | None,
    bias: Tensor | None,
    scheme: str,
) -> Tensor | None:
    """y = W x + b of weights of one pass, without torch's dispatcher.

    None where a compiler, a tracer or a gradient has to see the op, and for inputs or codes that
    `linear` has to look at first: integers, and codes that are not [out_features, bytes].
    """
    if only_result(x, codebook, scale, bias):
        return _one_pass(x, codes, codebook, scale, rotation, bias, scheme)
    return None


def _one_pass(
    x: Tensor,
    codes: Tensor,
    codebook: Tensor,
    scale: Tensor,
    rotation: Tensor | None,
    bias: Tensor | None,
    scheme: str,
) -> Tensor | None:
    """y by what the table chose; None for a weight of two passes, and as `eager_linear` says."""
    found = _bound(x.device, x.dtype, x.shape, scheme, codes.shape, env.BACKEND.get())
    if found is None:
        return None
    bound, run, parsed = found
    if bound is not None:
        y = bound(x, codes, codebook, scale, rotation, bias)
        if y is not None:
            return y
    result: Tensor = run(x, codes, codebook, scale, rotation, None, None, None, None, bias, parsed)
    return result


@dispatch.cached_by_table
def _bound(
    device: torch.device,
    dtype: torch.dtype,
    shape: torch.Size,
    scheme: str,
    codes: torch.Size,
    forced: str,
) -> tuple[dispatch.Bound | None, Callable[..., Tensor], VQScheme] | None:
    """The shorter way, and `run`, of the entry that the table chose: what every layer asks for
    every token, in one look. `forced` is HF_VQ_BACKEND, on which the answer depends."""
    parsed = parse(scheme)
    if len(codes) != 2 or parsed.two_passes or not dtype.is_floating_point:
        return None
    problem = described_problem("linear", device, dtype, shape, scheme, codes[0])
    return dispatch.bind(problem), dispatch.select(problem).run, parsed


def _linear(
    x: Tensor,
    codes: Tensor,
    codebook: Tensor,
    scale: Tensor,
    rotation: Tensor | None,
    *arguments: Any,
) -> Tensor:
    *second, bias, scheme = arguments
    y = _one_pass(x, codes, codebook, scale, rotation, bias, scheme)
    if y is None:
        problem = linear_problem("linear", x, scheme, codes.shape[0])
        y = dispatch.select(problem).run(
            x, codes, codebook, scale, rotation, *second, bias, parse(scheme)
        )
    return y


def _fake_linear(x: Tensor, codes: Tensor, *arguments: Any) -> Tensor:
    patches.apply(patches.TRACE)
    return x.new_empty(*x.shape[:-1], codes.shape[0])


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *stored, bias, scheme = inputs
    ctx.save_for_backward(*stored)
    ctx.scheme, ctx.length, ctx.dtype = scheme, x.shape[-1], x.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        weight = torch.ops.hf_vq.decode(*ctx.saved_tensors, ctx.scheme, ctx.length)
        grad_x = (grad.float() @ weight).to(ctx.dtype)
    if ctx.needs_input_grad[9]:
        grad_bias = grad.float().reshape(-1, grad.shape[-1]).sum(0).to(ctx.bias_dtype)
    return grad_x, *[None] * 8, grad_bias, None


define(
    "linear",
    "(Tensor x, Tensor codes, Tensor codebook, Tensor scale, Tensor? rotation, Tensor? codes_2, "
    "Tensor? codebook_2, Tensor? scale_2, Tensor? rotation_2, Tensor? bias, str scheme) -> Tensor",
    _linear,
    _fake_linear,
)
torch.library.register_autograd(
    "hf_vq::linear", _backward, setup_context=_save_for_backward, lib=library
)
horizontal_fusion.join(
    torch.ops.hf_vq.linear.default,
    torch.ops.hf_vq.linears.default,
    (1, 2, 3, 4, 9),
    horizontal_fusion.worth_while,
)
