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
        if takes(self, x):
            y = multiply_row(x, Dense(self.weight, "", self.weight.shape[1]), self.bias)
        # Not super(): a hook may have kept this method of a head that is an nn.Linear again.
        return nn.Linear.forward(self, x) if y is None else y


def takes(head: nn.Linear, x: Tensor) -> bool:
    """True if x is one row that fits weight and bias, and these are stored as kernels read them."""
    weight, bias = head.weight, head.bias
    columns, alike = weight.shape[1], (x.dtype, x.device)
    return (
        x.numel() == columns > 0
        and x.ndim > 0
        and x.shape[-1] == columns
        and (weight.dtype, weight.device) == alike
        and weight.stride(1) == 1
        and (bias is None or (bias.dtype, bias.device) == alike)
        and (bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous()))
    )


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
