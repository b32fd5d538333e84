"""`W4A8Linear`: a linear layer in QoQ's format, which multiplies integers."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .. import ops
from ..formats import qoq
from .lazy_activation import LazyActivation
from .linear import VQLinear


class W4A8Linear(VQLinear):
    """y = W x + b with W of 4 bits and x rounded to 8 (formats/qoq.py).

    Each token gets the scale of its largest number at every call, so nothing is learned of inputs.
    Arguments are those of `VQLinear`, with a `QoQScheme`.
    """

    op = "w4a8_linear"

    def check_codes(self, read: Callable[[str], Tensor], where: str) -> None:
        """See `QuantizedModule`: every weight must be an integer of 8 bits."""
        qoq.check(self.attributes, read, where)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        tensors = self.tensors()
        if isinstance(x, LazyActivation):
            y = x.times(tensors, bias, self.spec)
            if y is not None:
                return y
        return ops.w4a8_linear(x, tensors, bias, self.spec)
