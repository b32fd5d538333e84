"""`hf_vq::stored_gradients`: the gradient of a weight, carried to the floats that it is stored as.

    dL/dy, x --> dL/dW = dL/dy^T x --decode, backwards--> dL/dscale, dL/dcodebook

The reference decodes with operations that PyTorch differentiates, one layer at a time, in float32.
It is an op of its own so that a compiled backward pass does not look inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..formats.stored_weight import FLAT, SCHEMA, StoredWeight
from .library import define, parse
from .reference import codes as reference


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """dL/dW float32 [out, in] of y = W x, from dL/dy [..., out] and x [..., in]."""
    rows, inputs = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
    return rows.float().T @ inputs.float()


def gradients_of_stored(
    grad: Tensor, x: Tensor, stored: Sequence[Tensor | None], spec: str, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of the `stored` tensors of y = W x + b that are `wanted`, None for the others."""
    grads: list[Tensor | None] = [None] * len(stored)
    if any(wanted):
        grad_weight = weight_gradient(grad, x)
        found = torch.ops.hf_vq.stored_gradients(grad_weight, *stored, spec, list(wanted))
        for index in [i for i, asked in enumerate(wanted) if asked]:
            tensor = stored[index]
            assert tensor is not None
            grads[index] = found.pop(0).to(tensor.dtype)
    return grads


def _stored_gradients(grad: Tensor, *arguments: Any) -> list[Tensor]:
    *stored, spec, wanted = arguments
    trained = [index for index, asked in enumerate(wanted) if asked]

    def decode(*tensors: Tensor) -> Tensor:
        moved = dict(zip(trained, tensors, strict=True))
        whole = [moved.get(index, tensor) for index, tensor in enumerate(stored)]
        return reference.decode(StoredWeight.of_flat(whole, parse(spec), grad.shape[-1]))

    # Not torch.autograd.grad, which records nothing below the dispatcher, where an op may run.
    found: Any = torch.func.vjp(decode, *(stored[index].float() for index in trained))
    return list(found[1](grad))


def _fake(grad: Tensor, *arguments: Any) -> list[Tensor]:
    *stored, _, wanted = arguments
    return [
        torch.empty_like(tensor, dtype=torch.float32)
        for tensor, asked in zip(stored, wanted, strict=True)
        if asked
    ]


define(
    "stored_gradients",
    f"(Tensor grad, {SCHEMA}, str scheme, bool[{FLAT}] wanted) -> Tensor[]",
    _stored_gradients,
    _fake,
)
