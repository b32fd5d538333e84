"""Prompts of several requests at once: codes are decoded, and PyTorch's flash attention attends.

These are a few launches for a layer, however many requests there are, and the host waits for none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .batch import Prompts
from .pages import LayerPages

DECODED_BYTES = 256 << 20  # that attention may need besides the pages, at most
_LARGEST_HEAD, _ALIGNED = 256, 8  # numbers, of the kernel
# Bytes of a number of keys or values: its code, float32 before and after the mean, 16 bits.
_DECODED = 12


def decoded_bytes(kv_heads: int, head_dim: int) -> int:
    """Bytes that a token's keys and values are decoded to."""
    return kv_heads * head_dim * _DECODED


def is_flash(query: Tensor, kv_heads: int, prompts: Prompts, options: dict[str, Any]) -> bool:
    """Whether the kernel computes it, and what keys and values are decoded to fits into
    `DECODED_BYTES`.

    Args:
        query: [1, Hq, new tokens of the batch, D].
        kv_heads: of the pages.
        options: softcap and s_aux, as in `paged_attention`.
    """
    dim = query.shape[3]
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and dim <= _LARGEST_HEAD
        and dim % _ALIGNED == 0
        and not options["softcap"]
        and options["s_aux"] is None
        and prompts.total * decoded_bytes(kv_heads, dim) <= DECODED_BYTES
    )


def flash(layer: LayerPages, prompts: Prompts, query: Tensor, scaling: float | None) -> Tensor:
    """Attention of the new tokens of prompts over all their tokens: [1, Hq, new tokens, D].

    Args:
        query: [1, Hq, new tokens of the batch, D].
        scaling: factor of the logits; None = D^-1/2.
    """
    keys, values = layer.floats(prompts, query.dtype)
    new, every = prompts.begins
    out: Tensor = torch.ops.aten._flash_attention_forward(
        query[0].transpose(0, 1).index_select(0, prompts.rows), keys[0].transpose(0, 1),
        values[0].transpose(0, 1), new, every, prompts.longest_new, prompts.longest, 0.0, True,
        False, scale=query.shape[3] ** -0.5 if scaling is None else scaling,
    )[0]  # fmt: skip
    return out.transpose(0, 1)[None]
