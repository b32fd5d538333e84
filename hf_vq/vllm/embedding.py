"""Embeddings of vLLM whose rows are integers or codes, and the heads that are tied to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.utils import set_weight_attrs

from .. import ops
from ..formats.coded_rows import OF_ROWS, row_shapes, scheme_of, tensors_of
from ..formats.integers import decode_rows
from ..nn.embedding import head_product


class VQEmbeddingMethod(QuantizeMethodBase):
    """Loads and runs one embedding.

    Args:
        kind: of the rows (`VQConfig.embeddings`).
        where: its name, for errors.
    """

    def __init__(self, kind: str, where: str) -> None:
        self.kind, self.where = kind, where
        self.scheme = scheme_of(kind)

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Add the parameters of a `VQEmbedding`: rows of this rank, which vLLM loads like dense
        ones, what all rows share, and `like`, which has the dtype of the rows only.

        Raises:
            VQSchemeError: rows of this length cannot be stored.
        """
        self.features, rows = input_size, sum(output_partition_sizes)
        shapes = row_shapes(self.kind, rows, input_size, self.where)
        self.keys = tuple(shapes)[1:]
        for key, shape in shapes.items():
            split = {"input_dim": 1, "output_dim": 0} if key in OF_ROWS else {}
            parameter = nn.Parameter(torch.zeros(shape, dtype=torch.uint8), requires_grad=False)
            set_weight_attrs(parameter, {**split, **extra_weight_attrs})
            layer.register_parameter("weight" if key == "codes" else key, parameter)
        empty = torch.empty(0, dtype=params_dtype)
        layer.register_parameter("like", nn.Parameter(empty, requires_grad=False))

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """Give a head the parameters of the embedding."""
        for name in ("weight", *self.keys):
            setattr(layer, name, getattr(embed_tokens, name))
        return layer

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        """Rows [..., features] of token ids."""
        if self.scheme is not None:
            rows = ops.look_up(input_, self._tensors(layer), self.scheme, self.features)
            return rows.to(layer.like.dtype)
        rows = nn.functional.embedding(input_, layer.weight)
        return decode_rows(rows, self.kind, self.features).to(layer.like.dtype)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits [..., rows] of hidden states [..., features]."""
        if self.scheme is not None:
            return ops.linear(x, self._tensors(layer), bias, self.scheme)
        y = head_product(x, layer.weight, self.kind)
        return y if bias is None else y + bias

    def _tensors(self, layer: Any) -> dict[str, Tensor]:
        return tensors_of(
            {"codes": layer.weight, **{key: getattr(layer, key) for key in self.keys}}
        )
