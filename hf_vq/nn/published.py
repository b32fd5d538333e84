"""`PublishedLinear`: a linear layer in a published layout that no `VQScheme` stores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..errors import VQFormatError
from ..formats.published import Layout
from .linear import VQLinear, attribute_of


class PublishedLinear(VQLinear):
    """y = W x + b with W stored as another project published it.

    It loses nothing and runs anywhere. VPTQ's layout has kernels; of others the weight is decoded
    at every call: `hf-vq convert --requantize vq-4` makes a model that has kernels for all layers.

    Args:
        layout: how W is stored; `weight` holds its codes.
        size: out_features and in_features.
        bias: add a learned bias.
        dtype: dtype of the bias.
        where: name of the layer, for errors.
        source: class of the layer that this one replaces.

    Raises:
        VQFormatError: the layout cannot store a matrix of this size.
    """

    op = "published_linear"

    def __init__(
        self,
        layout: Layout,
        size: tuple[int, int],
        bias: bool,
        *,
        dtype: torch.dtype | None = None,
        where: str = "the layer",
        source: type[nn.Module] = nn.Linear,
    ) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = size
        self.layout, self.where, self.source = layout, where, source
        self.spec = layout.spec()  # compiled code compares this string, not a layout's fields
        self.specs, self.attributes = {}, {}
        for key, spec in layout.own(*size).items():
            self.attributes[key] = attribute_of(key)
            self.register(self.attributes[key], spec)
        empty = torch.empty(self.out_features, dtype=dtype)
        self.register_parameter("bias", nn.Parameter(empty) if bias else None)

    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by key (`Layout.own`)."""
        compiling = torch.compiler.is_compiling()
        return self.registered(dict(self._names()) if compiling else self.attributes)

    def _checked(self, x: Tensor) -> Tensor:
        if not x.is_floating_point() or x.shape[-1] != self.in_features:
            raise VQFormatError(
                f"{self.where} got an input of {x.dtype} {list(x.shape)}; its last dimension must "
                f"be in_features={self.in_features}, of floats."
            )
        return ops.published_linear(x, self.tensors(), self.bias, self.spec, self.out_features)

    def set_activations_bits(self, bits: int) -> None:
        """Do nothing: no kernel rounds inputs of such codes."""

    def decoded(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The dense weight [out_features, in_features]."""
        size = self.out_features, self.in_features
        return ops.decode_published(self.tensors(), self.layout, *size).to(dtype)

    def matrices(self, weight: str, dense: Tensor) -> list[Tensor]:
        """Nothing is fitted to a published layout."""
        raise VQFormatError(f"{self.where}: {self.layout.name()} is read, not made.")

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        bias: Any = self.bias is not None
        return f"{self.in_features}, {self.out_features}, bias={bias}, {self.layout.name()}"
