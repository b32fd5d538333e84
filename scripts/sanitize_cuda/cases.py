"""Helpers of the case makers: plans to cover, tensors, tolerances."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from hf_vq.codegen.plan import Dtype, Plan
from hf_vq.formats import VQScheme
from hf_vq.ops.reference import codes as reference
from tests.fixtures.random_weights import random_tensors

Case = tuple[str, Callable[[], None]]
FLOATS = {Dtype.FLOAT16: torch.float16, Dtype.BFLOAT16: torch.bfloat16,
          Dtype.FLOAT32: torch.float32}  # fmt: skip


def covering(plans: Iterable[Plan], seen: set[tuple[str, Any]]) -> Iterator[Plan]:
    """Plans that have a value of a field which none before them had, in an arbitrary order."""
    plans = sorted(plans, key=repr)
    for plan in random.Random(0).sample(plans, len(plans)):
        values = {(field.name, getattr(plan, field.name)) for field in fields(plan)}
        if not values <= seen:
            seen |= values
            yield plan


def stored(
    scheme: VQScheme, rows: int, columns: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Random tensors of a layer, here and on the GPU. What the GPU gets is copied: tools would look
    at every kernel of PyTorch, too."""
    tensors = random_tensors(scheme, rows, columns)
    return tensors, {key: tensor.cuda() for key, tensor in tensors.items()}


def decoded(tensors: dict[str, Tensor], scheme: VQScheme, columns: int) -> Tensor:
    """The weight, still rotated, in float64."""
    arguments = (tensors["codes"], tensors["codebook"], tensors["scale"])
    return reference.decode_rotated(*arguments, scheme, columns).double()


def close(found: Tensor, exact: Tensor, bound: float) -> None:
    """The result without its last row, which nobody may have written; `bound` is far above what
    rounding does, and far below what a wrong tile does."""
    y = found.cpu().double()
    assert y[-1].isnan().all(), "a row beyond the last was written"
    error = ((y[:-1] - exact).norm() / exact.norm()).item()
    assert error < bound, f"relative error {error}"
