"""Rows of codes, for embeddings: the tensors of a scheme (`formats.tensors`) as bytes.

    weight     [n, bytes]            codes: a row is looked up by its number
    scale      [n, 2]                fp16, one for each row
    signs      [features / 8]
    codebook   [1, 2^y, 2]           fp16

Transformers casts floating parameters to the dtype of a model, and DistributedDataParallel knows no
other integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import VQSchemeError
from .catalog import WEIGHT_SCHEMES
from .integers import row_bytes
from .scheme import VQScheme
from .tensors import tensor_specs

KINDS = tuple(f"turboquant-{bits}" for bits in range(2, 8))
"""What codes of rows are called. Those of a byte would have the shape of a dense tensor."""
KEYS = ("codes", "scale", "signs", "codebook")
OF_ROWS = ("codes", "scale")  # which have a part for each row
_HALVES = ("scale", "codebook")


def scheme_of(kind: str) -> VQScheme | None:
    """The scheme of rows, with one scale for each; None of integers."""
    return replace(WEIGHT_SCHEMES[kind], scale_group=0) if kind in KINDS else None


def row_shapes(
    kind: str, rows: int, features: int, where: str = "the embedding"
) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of bytes, by key, codes first; of integers the only one.

    Raises:
        VQSchemeError: the rows cannot be stored.
    """
    if (scheme := scheme_of(kind)) is None:
        return {"codes": (rows, row_bytes(kind, features, where))}
    try:
        found = tensor_specs(scheme, rows, features, where=where)
    except VQSchemeError as error:
        raise VQSchemeError(f"{error} Or use embeddings='int8'.") from error
    return {
        key: (*found[key].shape[:-1], found[key].shape[-1] * found[key].dtype.itemsize)
        for key in KEYS
    }


def stored_rows(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a scheme as they are stored."""
    return {key: tensors[key].contiguous().view(torch.uint8) for key in KEYS}


def tensors_of(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a scheme, in the memory of those that are stored."""
    return {
        key: each.view(torch.float16) if key in _HALVES else each for key, each in stored.items()
    }
