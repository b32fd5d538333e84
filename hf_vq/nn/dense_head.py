"""`DenseHead`: the output head that stays dense, at the speed of memory on a CPU."""

from __future__ import annotations

from torch import Tensor, nn
from torch.compiler import is_compiling

from .. import env
from ..dispatch.entry import load
from ..dispatch.table import HEADS
from ..ops.library import autocasts, is_plain_eager
from ..ops.program import Dense


class DenseHead(nn.Linear):
    """y = W x + bias with W in floats: of one row x, by what `dispatch.HEADS` has for the device.

    All parameters, and all other inputs, are those of nn.Linear.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        y = None
        if x.dtype is self.weight.dtype:
            y = multiply_row(x, Dense(self.weight, "", self.in_features), self.bias)
        return super().forward(x) if y is None else y


def multiply_row(x: Tensor, weight: Dense, bias: Tensor | None = None) -> Tensor | None:
    """x W^T + bias in the dtype of x; None: x is several rows, or nothing does it here."""
    kind = x.device.type
    if is_compiling() or kind not in HEADS or x.numel() != weight.columns:
        return None
    if env.BACKEND.get() not in ("", kind) or autocasts(x.device):
        return None
    if not is_plain_eager(x, weight.tensor, bias):
        return None
    y: Tensor | None = load(HEADS[kind])(x, weight, bias)
    return y
