"""Embeddings of vLLM whose rows are integers, and the output heads that are tied to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.utils import set_weight_attrs

from ..formats.integers import decode_rows, row_bytes
from ..nn.embedding import head_product


class VQEmbeddingMethod(QuantizeMethodBase):
    """Loads and runs one embedding.

    Args:
        kind: `int8` or `int4`.
        where: its name, for errors.
    """

    def __init__(self, kind: str, where: str) -> None:
        self.kind, self.where = kind, where

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
        """Add the parameters of a `VQEmbedding`: `weight`, uint8 [rows of this rank, bytes of a
        row], which vLLM loads like a dense one, and `like`, which has the dtype of the rows only.

        Raises:
            VQSchemeError: rows of this length cannot be stored.
        """
        self.features = input_size
        size = sum(output_partition_sizes), row_bytes(self.kind, input_size, self.where)
        weight = nn.Parameter(torch.zeros(size, dtype=torch.uint8), requires_grad=False)
        set_weight_attrs(weight, {"input_dim": 1, "output_dim": 0, **extra_weight_attrs})
        layer.register_parameter("weight", weight)
        empty = torch.empty(0, dtype=params_dtype)
        layer.register_parameter("like", nn.Parameter(empty, requires_grad=False))

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        """Rows [..., features] of token ids."""
        rows = nn.functional.embedding(input_, layer.weight)
        return decode_rows(rows, self.kind, self.features).to(layer.like.dtype)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits [..., rows] of hidden states [..., features]."""
        y = head_product(x, layer.weight, self.kind)
        return y if bias is None else y + bias
