"""The attention implementation `vq_paged`: what continuous batching calls with pages of codes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from ..errors import VQCacheError

NAME = "vq_paged"


def register() -> None:
    """Make `vq_paged` known to Transformers: it gets no mask, and needs none."""
    AttentionInterface.register(NAME, paged_attention)
    AttentionMaskInterface.register(NAME, no_mask)


def no_mask(*args: Any, **kwargs: Any) -> None:
    """Requests lie one after another, and each sees its own tokens only: that is no mask."""


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cache: Any = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as Transformers calls it in continuous batching.

    Args:
        module: the attention layer.
        query: [1, Hq, new tokens of all requests, D].
        key: [1, H, new tokens, D].
        value: [1, H, new tokens, D].
        attention_mask: None.
        cache: a `PagedCodes`, which holds the past.
        scaling: factor of the logits; None = D^-1/2.
        softcap: c of c tanh(s / c); None = off.
        s_aux: [Hq] logits that attend to nothing; None = off.

    Returns:
        [1, new tokens, Hq, D] and None.
    """
    from .cache import PagedCodes

    if not isinstance(cache, PagedCodes):
        raise VQCacheError(
            f"the attention {NAME!r} is for continuous batching with pages of codes; set another, "
            "such as model.set_attn_implementation('sdpa')."
        )
    out = cache.attend(module, query, key, value, scaling, softcap, s_aux, kwargs)
    return out.transpose(1, 2).contiguous(), None
