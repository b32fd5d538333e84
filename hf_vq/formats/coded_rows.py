"""Rows of codes, for embeddings: the tensors of a scheme (`formats.tensors`) as integers.

    weight     uint8 [n, bytes]      codes: a row is looked up by its number
    scale      int16 [n, 1]          fp16, one for each row
    signs      uint8 [features / 8]
    codebook   int16 [1, 2^y, 1]     fp16

Transformers casts floating parameters to the dtype of a model; integers stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import VQSchemeError
from .catalog import WEIGHT_SCHEMES
from .scheme import VQScheme
from .tensors import tensor_specs

KINDS = tuple(f"turboquant-{bits}" for bits in range(2, 8))
"""What codes of rows are called. Those of a byte would have the shape of a dense tensor."""
KEYS = ("codes", "scale", "signs", "codebook")


def scheme_of(kind: str) -> VQScheme:
    """The scheme of one of `KINDS`, with one scale for a row: scales of groups cost more than they
    give."""
    return replace(WEIGHT_SCHEMES[kind], scale_group=0)


def row_specs(
    kind: str, rows: int, features: int, where: str = "the embedding"
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each tensor, by key; codes first.

    Raises:
        VQSchemeError: the rows cannot be stored.
    """
    try:
        found = tensor_specs(scheme_of(kind), rows, features, where=where)
    except VQSchemeError as error:
        raise VQSchemeError(f"{error} Or use embeddings='int8'.") from error
    return {key: (found[key].shape, _integers(found[key].dtype)) for key in KEYS}


def stored_rows(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a scheme as they are stored."""
    return {key: tensors[key].contiguous().view(_integers(tensors[key].dtype)) for key in KEYS}


def tensors_of(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a scheme, in the memory of those that are stored."""
    return {
        key: each.view(torch.float16) if each.dtype is torch.int16 else each
        for key, each in stored.items()
    }


def _integers(dtype: torch.dtype) -> torch.dtype:
    return torch.int16 if dtype is torch.float16 else dtype
