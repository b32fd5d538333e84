"""Inputs of `w4a8_linear` that are rounded where they are computed: RMSNorm, and what a gated MLP
multiplies last (QServe, arXiv 2405.04532, section 5.1).

These functions are the specification; an entry of the table may have its own (`dispatch.Fused`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from .. import dispatch
from ..formats.stored_weight import W4A8Weight
from . import w4a8
from .library import linear_problem

Rounded = tuple[Tensor, Tensor]


def fused_inputs(x: Tensor, spec: str, rows: int) -> dispatch.Fused | None:
    """How `w4a8_linear` of x [..., k] takes inputs that are rounded already; None if it does not.

    Args:
        spec: of the `QoQScheme`.
        rows: of the weight.
    """
    return dispatch.select(linear_problem("w4a8_linear", x, spec, rows)).implementation.fused


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight of the last dimension, in float32, rounded to the dtype of
    x before and after the weight, as Llama's norm is."""
    wide = x.float()
    unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * unit.to(x.dtype)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) * up."""
    return silu(gate) * up


def rounded_norm(x: Tensor, weight: Tensor, eps: float) -> Rounded:
    """`rms_norm` as integers and scales of tokens."""
    return w4a8.quantize_tokens(rms_norm(x, weight, eps))


def rounded_gated(gate: Tensor, up: Tensor) -> Rounded:
    """`gated` as integers and scales of tokens."""
    return w4a8.quantize_tokens(gated(gate, up))


def multiply(rounded: Rounded, x: Tensor, weight: W4A8Weight, bias: Tensor | None) -> Tensor:
    """y = W round(x) + b; x is only described."""
    return w4a8.product(*rounded, weight, bias, x.dtype)


def linear(
    fused: dispatch.Fused,
    rounded: Any,
    x: Tensor,
    tensors: Mapping[str, Tensor],
    bias: Tensor | None,
    spec: str,
) -> Tensor:
    """`w4a8_linear` of an input that `fused` rounded; x is only described."""
    return fused.linear(rounded, x, W4A8Weight.of(tensors, w4a8.parse(spec), x.shape[-1]), bias)


reference = dispatch.Fused(w4a8.quantize_tokens, rounded_norm, rounded_gated, multiply)
